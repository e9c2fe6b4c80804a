"""Source tree and patches to checked modules for one kernel, in a staging folder."""
