"""Types and ranges of the `data` keys of text, one pydantic model per data set. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TextWindows(BaseModel):
    """What every text states: how long a window is, and how many of them are used."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    modality: ClassVar[Literal["images", "text"]] = "text"

    knows_informative: ClassVar[bool] = False
    """Which tokens decide the answer is known of every window."""

    any_length: ClassVar[bool] = True
    """The text can be read in windows of other lengths too."""

    num_masked: ClassVar[None] = None
    """A text has no patches."""

    context: int = Field(ge=1, description="tokens of a window; each predicts the next one")
    epoch_windows: int | None = Field(ge=1, description="training windows of one epoch; null = all")
    eval_windows: int | None = Field(ge=1, description="windows of `val` and of `test`, spread evenly; null = all")


class TokenizedText(TextWindows):
    """A text that is made into tokens and cut into windows."""

    tokenizer: Literal["byte", "bpe", "pretrained"] = Field(
        description="bytes | a byte-pair encoding trained on the training split | that of a pretrained model"
    )
    vocab_size: int = Field(ge=256, description="tokens of the encoding; for tokenizer=bpe as many are learned")
    tokenizer_folder: str | None = Field(
        description="tokenizer=pretrained: a folder or the name of a model on the Hugging Face hub"
    )
    documents: Literal["separate", "joined"] = Field(
        description="separate = a token attends within its own document only | joined = to all of its window"
    )
    root: str = Field(min_length=1, description="where trained encodings and encoded texts are cached")

    @model_validator(mode="after")
    def _a_pretrained_encoding_lies_somewhere(self) -> Self:
        if self.tokenizer == "pretrained" and self.tokenizer_folder is None:
            raise ValueError(
                "data.tokenizer_folder=null: data.tokenizer=pretrained needs a folder or the name of a model on the hub"
            )
        return self


class CarvedText(TokenizedText):
    """Texts without splits of their own: the last parts become `val` and `test`."""

    val_fraction: float = Field(gt=0, lt=1, description="part of the bytes that becomes `val`")
    test_fraction: float = Field(gt=0, lt=1, description="part of the bytes that becomes `test`, the last one")

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"data.val_fraction={self.val_fraction} and data.test_fraction={self.test_fraction} leave nothing to"
                " train on; expected a sum below 1"
            )
        return self


class ShakespeareData(CarvedText):
    """Plays of Shakespeare, 1.1 MB, inside the package."""

    name: Literal["shakespeare"]


class TextFilesData(CarvedText):
    """A text file, or all `.txt` files below a folder; with `train`, `val`, `test` folders or files, these splits."""

    name: Literal["text_files"]
    path: str = Field(min_length=1)


class HubTextData(CarvedText):
    """The first documents of a data set on the Hugging Face hub, streamed."""

    name: Literal["hub_text"]
    path: str = Field(min_length=1, description="name of the data set, or a local copy")
    subset: str | None = Field(description="configuration of the data set")
    text_key: str = Field(min_length=1, description="column that holds the text")
    max_bytes: int = Field(ge=1, description="documents are read until they have this many bytes together")


class InductionData(TextWindows):
    """Sequences with planted pairs: whoever sees a key again has to say the value that followed it."""

    knows_informative: ClassVar[bool] = True
    any_length: ClassVar[bool] = False

    name: Literal["induction"]
    vocab_size: Literal[256]
    num_keys: int = Field(ge=2, description="different keys")
    num_values: int = Field(ge=2, description="different values, the answers")
    num_pairs: int = Field(ge=1, description="pairs of key and value in a sequence")
    num_queries: int = Field(ge=1, description="keys that come again and ask for their value")
    num_train: int = Field(ge=1)
    num_val: int = Field(ge=1)
    num_test: int = Field(ge=1)
    seed: int = Field(ge=0, description="seed of the sequences; the run's seed does not enter")

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if self.num_keys + self.num_values > self.vocab_size - 16:
            raise ValueError(
                f"data.num_keys={self.num_keys} and data.num_values={self.num_values}: expected a sum of at most"
                f" {self.vocab_size - 16}, which leaves 16 tokens to fill with"
            )
        if not self.num_queries <= self.num_pairs <= self.num_keys:
            raise ValueError(
                f"data.num_queries={self.num_queries}, data.num_pairs={self.num_pairs}, data.num_keys={self.num_keys}:"
                " expected num_queries <= num_pairs <= num_keys"
            )
        half = (self.context + 1) // 4
        if self.num_pairs > half:
            raise ValueError(
                f"data.num_pairs={self.num_pairs}: at most {half} pairs fit into half of data.context={self.context}"
            )
        return self
