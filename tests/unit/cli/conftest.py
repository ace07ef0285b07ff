from tests.unit.registries import names_of_one_test as names_of_one_test
