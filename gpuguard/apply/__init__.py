"""Actions to a host: transaction with journal, backup, install, rollback."""
