"""Models: profiles, the bundled model, loading."""

from llm_latency.models.bundled import ModelFetchError, gguf_path, prepare, prepared_folder
from llm_latency.models.loading import load_config, load_draft, load_target, load_tokenizer
from llm_latency.models.profiles import PROFILES, Profile, choose_profile, profile_names

__all__ = [
    "PROFILES",
    "ModelFetchError",
    "Profile",
    "choose_profile",
    "gguf_path",
    "load_config",
    "load_draft",
    "load_target",
    "load_tokenizer",
    "prepare",
    "prepared_folder",
    "profile_names",
]
