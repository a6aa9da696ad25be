"""`prfaas up`: all of prfaas on one machine, with a demonstration."""
