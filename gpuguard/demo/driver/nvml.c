/*
 * The simulated driver of gpuguard demo: a libnvidia-ml.so.1 that answers from files.
 *
 * It lives at ROOT/usr/lib/ARCH/ of a demo tree and finds ROOT from its own path, so a copied
 * tree needs nothing done to it. What it says follows from the module that would be loaded:
 *
 *   ROOT/proc/sys/kernel/osrelease           which kernel runs
 *   ROOT/lib/modules/R/modules.dep           which nvidia module that kernel would load
 *   the module itself                        "standin-p2p-policy=…" is its answer about P2P
 *   ROOT/sys/module/nvidia/parameters/standin_p2p_policy
 *                                            instead: the answer of the module that is loaded
 *   ROOT/sys/bus/pci/devices                 the cards
 *
 * A compressed module is not read; tree.py notes its answer in POLICIES beside this library.
 * Only what gpuguard, nvidia-smi -L and nvidia-smi topo -p2p call is here. Numbers and record
 * layouts are those of nvml.h.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define POLICIES "gpuguard-demo-policies"
#define MAX_CARDS 64

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NOT_FOUND = 6,
	DRIVER_NOT_LOADED = 9,
	VERSION_MISMATCH = 18,
};

enum { P2P_OK = 0, P2P_CHIPSET = 1, P2P_NOT_SUPPORTED = 5, P2P_UNKNOWN = 6 };
enum { CAPS_READ = 0, CAPS_WRITE = 1, CAPS_PROP = 4 };

struct card {
	char bus_id[16]; /* 0000:01:00.0 */
	unsigned int domain, bus, device, function;
	unsigned int pci_id; /* device id in the upper half, vendor in the lower */
};

struct pci_info { /* nvmlPciInfo_t, version 3 */
	char bus_id_legacy[16];
	unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

struct memory { /* nvmlMemory_t and nvmlBAR1Memory_t, each in its own order */
	unsigned long long first, second, third;
};

static char root[PATH_MAX];
static char library_dir[PATH_MAX];
static struct card cards[MAX_CARDS];
static unsigned int card_count;
static unsigned int p2p_status;
static unsigned int users;

/* --- files of the tree ------------------------------------------------------------------ */

static bool find_root(void)
{
	Dl_info self;
	char path[PATH_MAX];

	if (!dladdr((void *)find_root, &self) || !realpath(self.dli_fname, path))
		return false;
	*strrchr(path, '/') = '\0';
	strcpy(library_dir, path);
	for (int level = 0; level < 3; level++) { /* usr, lib, x86_64-linux-gnu */
		char *slash = strrchr(path, '/');

		if (!slash)
			return false;
		*slash = '\0';
	}
	strcpy(root, path);
	return true;
}

/* The first line of a file below the root, without its end; empty if there is none. */
static void first_line(char *line, size_t size, const char *path)
{
	char full[PATH_MAX];
	FILE *file;

	line[0] = '\0';
	if (snprintf(full, sizeof(full), "%s/%s", root, path) >= (int)sizeof(full))
		return;
	file = fopen(full, "re");
	if (!file)
		return;
	if (fgets(line, size, file))
		line[strcspn(line, "\n")] = '\0';
	fclose(file);
}

/* --- the module that would be loaded ---------------------------------------------------- */

static bool is_core_module(const char *path)
{
	const char *slash = strrchr(path, '/');
	const char *name = slash ? slash + 1 : path;

	return !strncmp(name, "nvidia.ko", 9) || !strncmp(name, "nvidia-current-open.ko", 22);
}

/* Finds the module's path relative to ROOT/lib/modules/R, as depmod decided. */
static bool resolve_module(char *found, size_t size, const char *release)
{
	char path[PATH_MAX], *line = NULL;
	size_t capacity = 0;
	bool there = false;
	FILE *dependencies;

	if (snprintf(path, sizeof(path), "%s/lib/modules/%s/modules.dep", root, release) >=
	    (int)sizeof(path))
		return false;
	dependencies = fopen(path, "re");
	if (!dependencies)
		return false;
	while (!there && getline(&line, &capacity, dependencies) > 0) {
		line[strcspn(line, ":\n")] = '\0';
		there = is_core_module(line) && strlen(line) < size;
	}
	if (there)
		strcpy(found, line);
	free(line);
	fclose(dependencies);
	return there;
}

static bool holds(const char *data, size_t size, const char *text)
{
	return memmem(data, size, text, strlen(text)) != NULL;
}

static unsigned int policy_in(const char *data, size_t size)
{
	if (holds(data, size, "standin-p2p-policy=ok"))
		return P2P_OK;
	if (holds(data, size, "standin-p2p-policy=chipset-not-supported"))
		return P2P_CHIPSET;
	return P2P_UNKNOWN;
}

/* A kernel refuses a module that was built for another one. */
static bool fits_kernel(const char *data, size_t size, const char *release)
{
	char vermagic[512];

	snprintf(vermagic, sizeof(vermagic), "vermagic=%s ", release);
	return holds(data, size, vermagic);
}

static bool read_plain_module(const char *path, const char *release)
{
	struct stat status;
	char *data = MAP_FAILED;
	bool loadable;
	int file = open(path, O_RDONLY | O_CLOEXEC);

	if (file >= 0 && !fstat(file, &status) && status.st_size > 0)
		data = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
	if (file >= 0)
		close(file);
	if (data == MAP_FAILED)
		return false;
	loadable = fits_kernel(data, status.st_size, release);
	p2p_status = policy_in(data, status.st_size);
	munmap(data, status.st_size);
	return loadable;
}

/* Lines of POLICIES: size, modification time in seconds, answer, path below the root. */
static bool read_noted_policy(const char *path)
{
	char notes[PATH_MAX + sizeof(POLICIES) + 1], noted[PATH_MAX];
	long long size, modified;
	struct stat status;
	unsigned int answer;
	bool found = false;
	FILE *file;

	snprintf(notes, sizeof(notes), "%s/" POLICIES, library_dir);
	file = fopen(notes, "re");
	if (!file)
		return false;
	while (!found && !stat(path, &status) &&
	       fscanf(file, "%lld %lld %u %4095[^\n]", &size, &modified, &answer, noted) == 4)
		found = !strcmp(noted, path + strlen(root)) && size == status.st_size &&
			modified == status.st_mtime;
	fclose(file);
	if (found)
		p2p_status = answer;
	return found;
}

static bool load_module(void)
{
	char release[256], relative[1024], path[3 * PATH_MAX], loaded[128];

	first_line(loaded, sizeof(loaded), "sys/module/nvidia/parameters/standin_p2p_policy");
	if (loaded[0]) {
		p2p_status = policy_in(loaded, strlen(loaded));
		return true;
	}
	first_line(release, sizeof(release), "proc/sys/kernel/osrelease");
	if (!release[0] || !resolve_module(relative, sizeof(relative), release))
		return false;
	snprintf(path, sizeof(path), "%s/lib/modules/%s/%s", root, release, relative);
	if (!strcmp(path + strlen(path) - 3, ".ko"))
		return read_plain_module(path, release);
	return read_noted_policy(path);
}

static bool versions_match(void)
{
	char loaded[128];

	first_line(loaded, sizeof(loaded), "sys/module/nvidia/version");
	return !loaded[0] || !strcmp(loaded, DRIVER_VERSION);
}

/* --- the cards -------------------------------------------------------------------------- */

static unsigned int hex_file(const char *bus_id, const char *name)
{
	char path[128], text[32];

	snprintf(path, sizeof(path), "sys/bus/pci/devices/%.15s/%s", bus_id, name);
	first_line(text, sizeof(text), path);
	return strtoul(text, NULL, 16);
}

static int is_address(const struct dirent *entry)
{
	return strlen(entry->d_name) == 12;
}

static void find_cards(void)
{
	char path[PATH_MAX + 32];
	struct dirent **found;
	int count;

	card_count = 0;
	snprintf(path, sizeof(path), "%s/sys/bus/pci/devices", root);
	count = scandir(path, &found, is_address, alphasort);
	for (int i = 0; i < count; i++) {
		struct card *card = &cards[card_count];
		const char *name = found[i]->d_name;

		if (card_count < MAX_CARDS && hex_file(name, "vendor") == 0x10de &&
		    hex_file(name, "class") >> 16 == 0x03) {
			snprintf(card->bus_id, sizeof(card->bus_id), "%.15s", name);
			sscanf(name, "%x:%x:%x.%x", &card->domain, &card->bus, &card->device,
			       &card->function);
			card->pci_id = hex_file(name, "device") << 16 | 0x10de;
			card_count++;
		}
		free(found[i]);
	}
	if (count >= 0)
		free(found);
}

static struct card *card_of(void *device)
{
	struct card *card = device;

	return card >= cards && card < cards + card_count ? card : NULL;
}

/* FNV-1a over the bus id: a card keeps its UUID for as long as it keeps its slot. */
static void uuid_of(const struct card *card, char *uuid, size_t size)
{
	uint64_t hash = 0xcbf29ce484222325u, more;

	for (const char *byte = card->bus_id; *byte; byte++)
		hash = (hash ^ (unsigned char)*byte) * 0x100000001b3u;
	more = (hash ^ hash >> 29) * 0x9e3779b97f4a7c15u;
	snprintf(uuid, size, "GPU-%08x-%04x-4%03x-8%03x-%012llx", (unsigned)(hash >> 32),
		 (unsigned)(hash >> 16 & 0xffff), (unsigned)(hash & 0xfff),
		 (unsigned)(more >> 52), (unsigned long long)(more & 0xffffffffffff));
}

static int copy_text(char *target, unsigned int size, const char *text)
{
	return snprintf(target, size, "%s", text) < (int)size ? SUCCESS : 7; /* INSUFFICIENT_SIZE */
}

/* --- nvml.h ----------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	if (!find_root() || !load_module())
		return DRIVER_NOT_LOADED;
	if (!versions_match())
		return VERSION_MISMATCH;
	find_cards();
	users++;
	return SUCCESS;
}

int nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

int nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

int nvmlShutdown(void)
{
	if (!users)
		return UNINITIALIZED;
	users--;
	return SUCCESS;
}

const char *nvmlErrorString(int result)
{
	switch (result) {
	case SUCCESS: return "Success";
	case UNINITIALIZED: return "Uninitialized";
	case INVALID_ARGUMENT: return "Invalid Argument";
	case NOT_SUPPORTED: return "Not Supported";
	case NOT_FOUND: return "Not Found";
	case DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case VERSION_MISMATCH: return "Driver/library version mismatch";
	default: return "Unknown Error";
	}
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
	return copy_text(version, size, DRIVER_VERSION);
}

int nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
	return copy_text(version, size, "12." DRIVER_VERSION);
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
	*count = card_count;
	return users ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device)
{
	if (!users)
		return UNINITIALIZED;
	if (index >= card_count)
		return INVALID_ARGUMENT;
	*device = &cards[index];
	return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
	char text[96];

	for (unsigned int i = 0; i < card_count; i++) {
		uuid_of(&cards[i], text, sizeof(text));
		if (!strcmp(text, uuid))
			return nvmlDeviceGetHandleByIndex_v2(i, device);
	}
	return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device)
{
	unsigned int domain, bus, slot, function = 0;

	if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3)
		return INVALID_ARGUMENT;
	for (unsigned int i = 0; i < card_count; i++)
		if (cards[i].domain == domain && cards[i].bus == bus && cards[i].device == slot)
			return nvmlDeviceGetHandleByIndex_v2(i, device);
	return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *device, unsigned int *index)
{
	struct card *card = card_of(device);

	if (!card)
		return INVALID_ARGUMENT;
	*index = card - cards;
	return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int size)
{
	if (!card_of(device))
		return INVALID_ARGUMENT;
	return copy_text(name, size, "NVIDIA GeForce RTX 5090 (simulated)");
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int size)
{
	char text[96];

	if (!card_of(device))
		return INVALID_ARGUMENT;
	uuid_of(device, text, sizeof(text));
	return copy_text(uuid, size, text);
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *pci)
{
	struct card *card = card_of(device);

	if (!card)
		return INVALID_ARGUMENT;
	memset(pci, 0, sizeof(*pci));
	pci->domain = card->domain;
	pci->bus = card->bus;
	pci->device = card->device;
	pci->pci_device_id = card->pci_id;
	snprintf(pci->bus_id_legacy, sizeof(pci->bus_id_legacy), "%04X:%02X:%02X.%X",
		 card->domain & 0xffff, card->bus & 0xff, card->device & 0xff, card->function & 7);
	snprintf(pci->bus_id, sizeof(pci->bus_id), "%08X:%02X:%02X.%X", card->domain,
		 card->bus & 0xff, card->device & 0xff, card->function & 7);
	return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *count)
{
	*count = 0;
	return card_of(device) ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetBAR1MemoryInfo(void *device, struct memory *bar1)
{
	*bar1 = (struct memory){32ull << 30, 32ull << 30, 0}; /* total, free, used */
	return card_of(device) ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory)
{
	*memory = (struct memory){32ull << 30, 32ull << 30, 0}; /* total, free, used */
	return card_of(device) ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level)
{
	*level = 30; /* NVML_TOPOLOGY_HOSTBRIDGE */
	return card_of(one) && card_of(other) ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetP2PStatus(void *source, void *peer, int capability, int *status)
{
	if (!card_of(source) || !card_of(peer))
		return INVALID_ARGUMENT;
	switch (capability) {
	case CAPS_READ:
	case CAPS_WRITE:
	case CAPS_PROP:
		*status = p2p_status;
		return SUCCESS;
	default: /* nvlink, atomics: such a card has neither */
		*status = P2P_NOT_SUPPORTED;
		return SUCCESS;
	}
}

/* --- what nvidia-smi takes from a table without names ----------------------------------- */

#define TABLE_SLOTS 256

static uintptr_t table_nothing(void)
{
	return 0;
}

static uintptr_t table_handle(unsigned int index, void **device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlInternalGetExportTable(const void **table, const void *table_id)
{
	static uintptr_t slots[TABLE_SLOTS];

	(void)table_id; /* one table serves every caller: slots that are not used answer 0 */
	for (unsigned int i = 1; i < TABLE_SLOTS; i++)
		slots[i] = (uintptr_t)table_nothing;
	slots[0] = 0x1000; /* its size, as nvidia-smi 535 checks it */
	slots[81] = (uintptr_t)table_handle;
	*table = slots;
	return SUCCESS;
}
