"""The command line; the only package that prints, and turns errors into exit statuses."""
