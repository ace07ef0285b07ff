from alphaapollo.data.examples import LoadedExamples, make_source_names


def test_names_are_as_short_as_possible_and_distinct():
    assert make_source_names("data/train.parquet") == ["train"]
    assert make_source_names(["data/maths.parquet", "data/code.jsonl"]) == ["maths", "code"]
    assert make_source_names(["a/train.parquet", "b/train.parquet"]) == ["a/train", "b/train"]


def test_the_same_file_twice_has_one_name():
    assert len(set(make_source_names(["a/b.parquet", "a/b.parquet"]))) == 1


def test_examples_by_source():
    read = LoadedExamples(["a", "b", "c"], file_sizes=[2, 0, 1], notices=[])
    assert read.split_by_file() == [["a", "b"], [], ["c"]]
