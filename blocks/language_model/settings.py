"""The settings of a language model, and the clients built from them. This module does not need Prefect."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from .litellm_client import LiteLLMModel

# Arguments of a request that options must not override.
RESERVED_OPTIONS = {
    *("model", "messages", "api_key", "api_base", "timeout", "num_retries", "max_retries", "stream", "logger_fn"),
}


class LanguageModelSettings(BaseModel):
    """The settings of a language model: names, credentials, sampling, timeouts, retries and prices."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)  # The input has secrets.

    model: str = Field(
        title="Model",
        min_length=1,
        description="Name of the model in LiteLLM, such as openai/gpt-4o-mini, anthropic/claude-sonnet-4-5 or "
        "ollama_chat/llama3.2.",
    )
    sub_model: str | None = Field(
        default=None,
        title="Sub-model",
        description="Model for llm_query and llm_query_batched; by default the same.",
    )
    api_key: SecretStr | None = Field(
        default=None,
        title="API key",
        description="Key for the API; by default the environment's, such as OPENAI_API_KEY. It stays on the host.",
    )
    api_base: str | None = Field(
        default=None,
        title="API base",
        description="Address of a server of your own, such as http://127.0.0.1:11434.",
    )
    temperature: float | None = Field(
        default=None, ge=0, title="Temperature", description="Sampling temperature; by default the model's own."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        title="Top p",
        description="Nucleus sampling's share of probability; by default the model's own.",
    )
    max_tokens: int | None = Field(
        default=None, ge=1, title="Most tokens", description="Tokens of one answer; by default the model's own limit."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        title="Options",
        description="Other arguments of LiteLLM's completion, such as reasoning_effort. Put no secrets here.",
    )
    sub_options: dict[str, Any] = Field(
        default_factory=dict,
        title="Sub-model's options",
        description="Arguments of LiteLLM's completion for llm_query and llm_query_batched only, such as temperature "
        "or max_tokens. They win over the fields above.",
    )
    request_timeout: float = Field(
        default=120.0, gt=0, title="Request timeout", description="Seconds for each request to the model."
    )
    retries: int = Field(
        default=2,
        ge=0,
        title="Retries",
        description="Retries of a request after a timeout, a 429 or a server failure.",
    )
    input_cost_per_token: float | None = Field(
        default=None,
        ge=0,
        title="Input price",
        description="US dollars per token of a prompt; by default from LiteLLM's list. Use 0 for a model of your own.",
    )
    output_cost_per_token: float | None = Field(
        default=None,
        ge=0,
        title="Output price",
        description="US dollars per token of an answer; by default from LiteLLM's list.",
    )

    @field_validator("options", "sub_options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        reserved = sorted(RESERVED_OPTIONS & options.keys())
        if reserved:
            raise ValueError(f"options cannot contain {', '.join(reserved)}: use the block's own fields")
        return options

    def make_root_model(self) -> LiteLLMModel:
        """Return the model for recursive queries."""
        fields = self.model_dump(include={"temperature", "top_p", "max_tokens"}, exclude_none=True)
        return LiteLLMModel(self.model, self, self.options | fields)

    def make_flat_model(self) -> LiteLLMModel:
        """Return the model for flat queries."""
        root = self.make_root_model()
        return LiteLLMModel(self.sub_model or self.model, self, root.sampling | self.sub_options)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that an answer depends on, as JSON without secrets and limits."""
        names = ("model", "sub_model", "api_base", "temperature", "top_p", "max_tokens", "options", "sub_options")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, {})}
