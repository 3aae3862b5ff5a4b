"""The policy. Its configuration stands in ``megarl.config.policy``, and has NeMo-RL's names here too."""

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
