//! The weights of which tensor-parallel ranks take columns.

/// The weights of linear modules whose input is divided among ranks: `RowParallelLinear` in vLLM's
/// `model_executor/models` and in Megatron's `core`. Their weight is `[output, input]`, so that each rank has columns.
/// (GPT-2's `c_proj` is `[input, output]`: there ranks have rows.)
pub(super) const COLUMN_CUT: &[&str] = &[
    // Llama, Mistral, Qwen, Gemma, DeepSeek and most others: the output of attention and of the MLP, and each expert's.
    "**.o_proj.weight",
    "**.down_proj.weight",
    // GPT-NeoX, Falcon, ChatGLM, Phi, BLOOM: the same two. `dense` alone is the name of other modules, too.
    "**.attention.dense.weight",
    "**.self_attention.dense.weight",
    "**.self_attn.dense.weight",
    "**.dense_4h_to_h.weight",
    // OPT, Whisper, MPT, and layers with states instead of attention.
    "**.out_proj.weight",
    "**.fc2.weight",
    // InternLM 2: attention and MLP. Mixtral: each expert.
    "**.attention.wo.weight",
    "**.w2.weight",
    // Megatron core: attention, MLP, and the latter of experts, whose weights are numbered.
    "**.linear_proj.weight",
    "**.linear_fc2.weight*",
];
