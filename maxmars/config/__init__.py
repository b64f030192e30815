"""Configs of runs: frozen dataclasses, all importable from here, and their checks.

Neither this room nor what it imports loads JAX, so that `--help` and a wrong option answer at once.
"""

from maxmars.config.comparison import ComparisonConfig
from maxmars.config.data import (
    DataConfig,
    DataOptions,
    GrainConfig,
    GrainPart,
    GrainSource,
    MixtureChange,
    MixtureConfig,
    MixturePart,
    Order,
    Packing,
    PythonSourcesConfig,
    TokenFilesConfig,
    TokenShardsConfig,
    ValidationSet,
)
from maxmars.config.load import load_config
from maxmars.config.model import GPT2Config, ModelConfig, ModuleConfig
from maxmars.config.optimizer import (
    AdamWConfig,
    LionConfig,
    MarsConfig,
    MomentumKernelConfig,
    MuonConfig,
    NAdamWConfig,
    OptaxConfig,
    OptimizerConfig,
    SoapConfig,
    WeightUpdateConfig,
)
from maxmars.config.train import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    LogConfig,
    MeshConfig,
    ScheduleConfig,
    TrainConfig,
    differences,
    from_dict,
    to_dict,
)
from maxmars.config.user_code import Source
