"""Every option of training, with its default and its range. A config file overrides only what changes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipway.config import option, section
from slipway.contract import Preprocessing, can_be_a_directory
from slipway.paths import PROJECT_ROOT

FormatName = Literal[
    "onnx",
    "onnx-fp16",
    "onnx-int8",
    "pt2",
    "torchscript",
    "openvino",
    "openvino-bf16",
    "openvino-int8",
    "aoti",
    "aoti-bf16",
]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = option("run", "name of the run and of its bundles")
    directory: Path = option(PROJECT_ROOT / "runs", "where runs are kept")
    bundles: Path = option(PROJECT_ROOT / "bundles", "where exported bundles are kept")
    loggers: tuple[Literal["mlflow", "wandb"], ...] = option(
        (), "experiment trackers besides TensorBoard (`make extras` installs them)"
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if not can_be_a_directory(self.name):
            yield "name", f"is {self.name!r}; it becomes a directory name, so no slashes and no leading dot"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: Literal["folder", "manifest", "shards", "huggingface"] = option(
        "folder",
        "what `root` is: a folder of images, a table of them (.csv, .parquet), a folder of *.tar, or a data set that "
        "Hugging Face's library saved",
    )
    root: Path = option(
        PROJECT_ROOT / "data", "image folder (<class>/*, or {train,val,test}/<class>/*), table, or shards"
    )
    url: str | None = option(None, "s3://bucket/prefix of shards that lie there instead of in `root`")
    classes: Path | None = option(
        None, "file with a class a line, in the order of the model's outputs; null sorts the names found"
    )
    cache: Path = option(
        PROJECT_ROOT / "data" / ".cache", "indices of shards, and test images copied out of tables and shards"
    )
    embedded: Literal["digits", "photos"] | None = option(
        None, "write this embedded data set to `root` first"
    )
    val_fraction: float = option(
        0.15, "share of a folder without splits held out for validation", above=0, below=1
    )
    test_fraction: float = option(
        0.15, "share of a folder without splits held out for the test", above=0, below=1
    )
    split_seed: int = option(0, "another seed draws another split", at_least=0)
    on_bad_sample: Literal["error", "skip"] = option(
        "error", "a training image that cannot be decoded: stop, or count it and let it weigh nothing"
    )
    workers: int = option(2, "processes that decode and augment, per rank", at_least=0)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.val_fraction + self.test_fraction >= 1:
            yield "val_fraction", "and data.test_fraction leave nothing to train on"
        if self.url is not None and (self.source != "shards" or not self.url.startswith("s3://")):
            yield "url", "is for data.source: shards, and begins with s3://"
        if self.embedded and self.source != "folder":
            yield "embedded", "is written as an image folder; set data.source to folder"


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    size: int = option(224, "height and width of the model input, pixels", at_least=1)
    resize: int = option(
        0,
        "shorter side is scaled to this before the centre is cut out; 0: in proportion to image.size, 256 for 224",
        at_least=0,
    )
    interpolation: Literal["bilinear", "bicubic"] = option("bilinear", "antialiased filter")
    background: tuple[int, int, int] = option((0, 0, 0), "RGB behind transparent pixels, 0..255")
    max_bytes: int = option(32 * 2**20, "larger files are refused", above=0)
    max_pixels: int = option(64_000_000, "larger images are refused before decoding", above=0)
    max_aspect_ratio: float = option(100.0, "more elongated images are refused", at_least=1)
    mean: tuple[float, float, float] = option((0.485, 0.456, 0.406), "per channel, of values in 0..1")
    std: tuple[float, float, float] = option((0.229, 0.224, 0.225), "per channel, of values in 0..1")

    def __post_init__(self) -> None:
        """Put the number that `resize: 0` stands for in its place, so that all that is written down holds it."""
        if self.resize == 0:
            object.__setattr__(self, "resize", (self.size * 256 + 112) // 224)  # rounded; sizes may be huge

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.resize < self.size:
            yield (
                "resize",
                f"is {self.resize}, smaller than image.size {self.size}: there would be nothing to cut",
            )
        if not all(0 <= value <= 255 for value in self.background):
            yield "background", f"is {list(self.background)}; each channel must be 0..255"
        if not all(value > 0 for value in self.std):
            yield "std", f"is {list(self.std)}; each channel must be above 0"

    def preprocessing(self) -> Preprocessing:
        return Preprocessing(
            image_size=self.size,
            resize_size=self.resize,
            interpolation=self.interpolation,
            background=self.background,
            max_bytes=self.max_bytes,
            max_pixels=self.max_pixels,
            max_aspect_ratio=self.max_aspect_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    min_scale: float = option(0.35, "smallest share of the area a random crop keeps", above=0, at_most=1)
    max_stretch: float = option(4 / 3, "a random crop's aspect ratio is drawn from 1/this..this", at_least=1)
    flip: float = option(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    policy: Literal["none", "trivial", "rand"] = option(
        "none", "distortions after the crop: TrivialAugment (wide), or RandAugment (2 operations, 9 of 30)"
    )
    erase: float = option(0.0, "probability that a part is overwritten with noise", at_least=0, at_most=1)
    mixup: float = option(
        0.0, "blend pairs of images: parameter of the Beta distribution; 0: never", at_least=0
    )
    cutmix: float = option(0.0, "paste boxes from one image into another: the same parameter", at_least=0)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What `data check` makes of its findings. Bad files are an error, unless `data.on_bad_sample` skips them."""

    leaks: Literal["error", "warn"] = option("error", "one image in more than one split")
    near_leaks: Literal["error", "warn"] = option("warn", "images of different splits that look alike")
    contradictions: Literal["error", "warn"] = option("warn", "one image under several classes")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = option("resnet18", "a torchvision classification model, by name")
    dropout: float | None = option(
        None, "probability of every dropout layer; null leaves the model's own", at_least=0, below=1
    )
    stem: Literal["standard", "small"] = option(
        "standard", "small: keep the resolution of images below 64 pixels"
    )
    pretrained: str | None = option(None, "torchvision weights to start from, such as DEFAULT")
    start_from: Path | None = option(None, "a checkpoint or a bundle whose weights to start from")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.pretrained and self.start_from:
            yield "pretrained", "and model.start_from are both given; weights can come from one of them only"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["sgd", "adamw"] = option("adamw", "sgd has Nesterov momentum 0.9")
    lr: float = option(1e-3, "peak learning rate", above=0)
    weight_decay: float = option(0.05, "of weights; norms and biases are spared", at_least=0)
    warmup: float = option(0.1, "share of all steps in which the learning rate rises", at_least=0, below=1)
    clip_norm: float | None = option(1.0, "largest gradient norm; null clips nothing", above=0)
    freeze: tuple[str, ...] = option((), "names of parameters that do not learn, such as backbone.layer1.*")
    lr_scales: tuple[str, ...] = option(
        (), "learning rates relative to `lr`, such as backbone.fc.*=10; the last that matches counts"
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        for entry in self.lr_scales:
            pattern, _, factor = entry.rpartition("=")
            if not pattern or not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", factor) or float(factor) == 0:
                yield "lr_scales", f"has {entry!r}; expected a name pattern, =, and a factor above 0"

    def scales(self) -> dict[str, float]:
        """Pattern -> factor, in the order given."""
        parts = (entry.rpartition("=") for entry in self.lr_scales)
        return {pattern: float(factor) for pattern, _, factor in parts}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    epochs: int = option(10, "passes over the training split", at_least=1)
    batch_size: int = option(64, "samples per optimiser step, over all ranks and micro-batches", at_least=1)
    accumulate: int = option(1, "micro-batches a rank works off per step, to save memory", at_least=1)
    label_smoothing: float = option(0.0, "share of the target spread over all classes", at_least=0, below=1)
    seed: int = option(0, "of weights, data order and augmentation", at_least=0)
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "auto"] = option(
        "32-true", "of the forward and backward pass; auto: bf16-mixed where the device has it built in"
    )
    log_every: int = option(5, "steps between lines in metrics.jsonl", at_least=1)
    checkpoint_every: int | None = option(None, "steps between checkpoints, besides one an epoch", at_least=1)
    ema: float | None = option(
        None, "decay of a moving average of the weights, such as 0.999; null keeps none", at_least=0, below=1
    )
    patience: int | None = option(
        None, "epochs without a better validation after which training ends; null waits for ever", at_least=1
    )
    on_bad_loss: Literal["stop", "skip", "rollback"] = option(
        "stop", "skip: pass over the samples; rollback: return to the last checkpoint, then pass over them"
    )
    spike_factor: float | None = option(
        None, "a loss so many times its recent average is bad too; null: only NaN and infinity are", above=1
    )
    log_layers_every: int | None = option(None, "steps between gradient norms of every layer", at_least=1)
    keep_checkpoints: int = option(2, "newest checkpoints kept besides the best", at_least=1)

    def micro_batch(self, ranks: int) -> int:
        """Images that each of so many ranks takes at a time."""
        return self.batch_size // self.accumulate // ranks


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    accelerator: Literal["auto", "cpu", "cuda"] = option("auto", "auto: CUDA where there is a device")
    devices: int = option(1, "processes on this machine; torchrun's own count goes before", at_least=1)
    strategy: Literal["auto", "ddp", "fsdp2"] = option(
        "auto", "of several processes: ddp copies the model, fsdp2 shards it; auto: ddp"
    )
    replicas: int = option(
        1, "fsdp2: copies of the model, each sharded over its share of the processes", at_least=1
    )
    activation_checkpointing: Literal["none", "block", "selective"] = option(
        "none", "compute activations again in backward; selective: but for convolutions and matrix products"
    )
    compile: Literal["none", "block", "whole"] = option("none", "what torch.compile takes at a time")
    channels_last: bool = option(default=False, help="lay images out as NHWC, which many devices prefer")
    background_saving: bool = option(
        default=False, help="write checkpoints while training goes on; takes memory for a copy of the state"
    )
    deterministic: bool = option(default=True, help="refuse operations that differ from run to run")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.replicas > 1 and self.strategy != "fsdp2":
            yield "replicas", f"is {self.replicas}, which only hardware.strategy fsdp2 knows"
        if self.compile != "none" and self.activation_checkpointing != "none":
            yield (
                "activation_checkpointing",
                "does not go together with hardware.compile, which chooses by itself what to compute again",
            )


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    mode: Literal["one-batch", "overfit"] | None = option(
        None, "one-batch: one step of everything; overfit: learn one batch by heart"
    )
    anomaly: bool = option(default=False, help="let autograd name the operation that made a NaN (slow)")
    profile: bool = option(default=False, help="record a few steps with torch.profiler")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    max_batch: int = option(32, "largest batch the artefact promises to take", at_least=2)
    golden_per_class: int = option(2, "validation images of each class that the bundle carries", at_least=1)
    golden_limit: int = option(40, "most golden images altogether", at_least=1)
    formats: tuple[FormatName, ...] = option(
        ("onnx",), "what the bundle holds; onnx always, since others are made from it"
    )
    calibration_images: int = option(256, "training images that int8 is calibrated on", at_least=1)
    max_accuracy_drop: float = option(
        0.5, "percentage points of validation accuracy that fp16, bf16 and int8 may cost", at_least=0
    )
    recommend: bool = option(
        default=False, help="measure every format, and serve the fastest that servers can run"
    )
    sign_key: Path | None = option(
        None, "private key (PEM, elliptic curve) that bundles are signed with; null signs nothing"
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if "onnx" not in self.formats:
            yield "formats", f"is {list(self.formats)}; onnx must be among them: others are made from it"
        if len(set(self.formats)) < len(self.formats):
            yield "formats", f"is {list(self.formats)}; it names one twice"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole of training. `python -m train fit --help` lists it."""

    run: RunConfig = section(RunConfig)
    data: DataConfig = section(DataConfig)
    image: ImageConfig = section(ImageConfig)
    augment: AugmentConfig = section(AugmentConfig)
    doctor: DoctorConfig = section(DoctorConfig)
    model: ModelConfig = section(ModelConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    training: TrainingConfig = section(TrainingConfig)
    hardware: HardwareConfig = section(HardwareConfig)
    debug: DebugConfig = section(DebugConfig)
    export: ExportConfig = section(ExportConfig)
