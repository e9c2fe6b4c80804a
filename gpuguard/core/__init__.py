"""Pure decisions: facts in, findings and plans out. No I/O."""
