"""`prfaas check`: what is wrong with a configuration and with what it names, and how to mend it."""
