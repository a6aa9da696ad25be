"""Engine-side plug-in of prfaas; imports only the standard library and numpy."""
