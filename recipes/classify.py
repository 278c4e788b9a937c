"""Image classification by a vision-language model: ``dataproto classify``.

With no arguments it draws pictures of 48 classes, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With
``--model-path`` and ``--data-path`` it takes a folder of class directories (as Caltech-101's) or a data set with an image and a
label column. Accuracy is that of greedy answers which are exactly right, measured before, during and after.
"""

from dataproto import DataProto
from recipes.configs.classify_config import PRESETS, TINY, ClassifyConfig, ClassifyDataConfig, parse
from recipes.data.column_keys import eval_sets
from recipes.data.labelled_pictures import LabelledData, drawn_data, labelled_data
from recipes.data.loader import PromptLoader, check_row, check_rows
from recipes.data.splits import tell_data
from recipes.options import training_command
from recipes.run.policy_gradient import prompt_loader
from recipes.run.supervised import SupervisedTask, rows_builder, run_supervised, supervised_evaluation
from rollout.prompts import SupervisedBuilder

__all__ = ["PRESETS", "TINY", "ClassifyConfig", "ClassifyDataConfig", "main", "parse"]


def classification_task(config: ClassifyConfig, model_path: str) -> SupervisedTask:
    """Questions about labelled pictures, and the evaluation: the loss, greedy answers, and the share that names no class."""
    data = config.data
    labelled = open_labelled(data, config.run.seed)
    builder = rows_builder(SupervisedBuilder, data, model_path)
    loader = prompt_loader(config, builder, labelled.train, shuffle=data.data_path is not None)
    tell_data(loader, *labelled.held_out.values())
    if data.on_bad_row == "stop":  # before a model is loaded
        _check_pictures(config, loader, labelled)
    answers = {data.templates().answer.replace("{label}", label).strip() for label in labelled.classes}

    def other_answers(answered: list[DataProto]) -> dict[str, float]:
        texts = [text.strip() for batch in answered for text in batch["response_text"]]
        return {"val/other_answers": sum(text not in answers for text in texts) / len(texts) if texts else 0.0}

    evaluate = supervised_evaluation(config, data, model_path, labelled.held_out, builder, other_answers)
    return SupervisedTask(builder, loader, evaluate, longest=data.max_length + data.max_response_length)


def _check_pictures(config: ClassifyConfig, loader: PromptLoader, labelled: LabelledData) -> None:
    """Checks the files of all pictures that a run will read; drawn ones are alike, so the first is enough."""
    if config.data.data_path is None:
        check_row(labelled.train, 0, loader.builder)
        return
    check_rows(loader, None if config.run.epochs else config.run.steps * config.data.batch_size)
    for rows in labelled.held_out.values():
        for place in range(len(rows)):
            check_row(rows, place, loader.builder)


def open_labelled(data: ClassifyDataConfig, seed: int) -> LabelledData:
    """The pictures that the options name."""
    templates = data.templates()
    if data.data_path is None:
        return drawn_data(data.eval_rows, seed, templates)
    columns = data.image_column, data.label_column
    sets = eval_sets(data.eval_data_path)
    return labelled_data(data.data_path, data.eval_rows, seed, templates, columns, data.exclude, data.on_bad_row, sets)


main = training_command(parse, run_supervised, lambda _: classification_task)
