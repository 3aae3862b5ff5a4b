"""The driver's policy and its workers. The configuration types are defined in ``megarl.config.policy`` and
re-exported here under NeMo-RL's names."""

from megarl.config.policy import (
    DTensorConfig,
    DynamicBatchingConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    PolicyConfig,
    PytorchOptimizerConfig,
    RewardModelConfig,
    SequencePackingConfig,
    SinglePytorchSchedulerConfig,
    TokenizerConfig,
)

__all__ = [
    "DTensorConfig",
    "DynamicBatchingConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "PolicyConfig",
    "PytorchOptimizerConfig",
    "RewardModelConfig",
    "SequencePackingConfig",
    "SinglePytorchSchedulerConfig",
    "TokenizerConfig",
]
