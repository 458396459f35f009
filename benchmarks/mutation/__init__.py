"""Wrong single lines are put into the code one by one: do the tests notice? (docs/mutation.md)"""
