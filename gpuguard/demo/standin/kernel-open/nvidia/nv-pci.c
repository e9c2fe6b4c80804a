/* nvidia.ko: what it finds on the PCI bus. It looks and claims nothing. */

#include <linux/pci.h>

#include "nv-standin.h"

#define NV_PCI_VENDOR 0x10de
#define NV_BAR1 1

/* Peers reach a card's memory through BAR 1, so a window smaller than the memory is no use. */
static bool nv_pci_bar1_usable(struct pci_dev *card)
{
	/* The firmware's window is left as it is. */
	return pci_resource_len(card, NV_BAR1) > 0;
}

unsigned int nv_pci_count_cards(void)
{
	struct pci_dev *card = NULL;
	unsigned int count = 0;

	while ((card = pci_get_device(NV_PCI_VENDOR, PCI_ANY_ID, card)))
		if (nv_pci_bar1_usable(card))
			count++;
	return count;
}
