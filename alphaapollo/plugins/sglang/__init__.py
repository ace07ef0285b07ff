"""Engine on SGLang, in a process with the Python of SGLang's environment."""
