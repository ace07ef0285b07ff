"""Values of the pages: functions from the index and the files of a run to the values of a template."""
