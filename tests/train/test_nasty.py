from slipway.contract import Preprocessing
from train.nasty import nasty


def test_corpus_is_the_same_every_time_and_no_two_are_alike() -> None:
    rules = Preprocessing(image_size=16, resize_size=18)
    corpus = nasty(rules)
    assert {(pixels.shape, str(pixels.dtype)) for pixels in corpus.values()} == {((3, 16, 16), "uint8")}
    content = [pixels.tobytes() for pixels in corpus.values()]
    assert len(set(content)) == len(corpus)
    assert content == [pixels.tobytes() for pixels in nasty(rules).values()]
    assert corpus["white"].min() == 255
    assert corpus["red"][0].min() == 255
    assert corpus["red"][1:].max() == 0


def test_smallest_model_input_has_a_corpus() -> None:
    assert nasty(Preprocessing(image_size=1, resize_size=1))


def test_what_the_rules_refuse_is_left_out() -> None:
    rules = Preprocessing(image_size=16, resize_size=18)
    strict = Preprocessing(image_size=16, resize_size=18, max_aspect_ratio=4.0)
    assert nasty(rules).keys() - nasty(strict).keys() == {"elongated"}
