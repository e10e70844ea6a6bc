"""What Lightning needs to be told about skipped windows, devices and strategies, and what it has to be asked."""
