"""What the repository is made and tested with; not part of the installed program."""
