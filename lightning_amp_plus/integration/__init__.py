"""What Lightning needs to be told about skipped windows, devices and strategies. Used by ``precision`` only."""
