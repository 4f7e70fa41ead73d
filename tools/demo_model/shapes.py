"""Names and shapes of the demo model's parameters, as in the Hugging Face checkpoint."""

from tools.demo_model.architecture import DemoConfig

Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(config: DemoConfig) -> Shapes:
    """Return the shape of every checkpoint tensor, embedding first, then layer by layer."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        if layer == config.ple_layer:
            shapes |= prefixed(prefix + "ple.", ple_shapes(config))
        shapes |= prefixed(prefix + "attn_hyper_connection.", mixer_shapes(config, inject=True))
        if config.is_attention(layer):
            shapes |= prefixed(prefix + "self_attn.", attention_shapes(config))
        else:
            shapes |= prefixed(prefix + "linear_attn.", gdn_shapes(config))
        shapes |= prefixed(prefix + "mlp_hyper_connection.", mixer_shapes(config, inject=True))
        shapes |= prefixed(prefix + "mlp.", moe_shapes(config))
    return shapes | prefixed("model.hyper_connection_mixer.", mixer_shapes(config, inject=False))


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    """Return `shapes` with `prefix` before every name."""
    return {prefix + name: shape for name, shape in shapes.items()}


def mixer_shapes(config: DemoConfig, *, inject: bool) -> Shapes:
    """Return the shapes of one stream mixer."""
    streams = config.hc_count * config.hidden_size
    shapes: Shapes = {
        "hc_norm.weight": (streams,),
        "input_mix_weight_down.weight": (config.hc_lowrank, streams),
        "input_mix_weight_up.weight": (streams, config.hc_lowrank),
    }
    if inject:
        shapes["block_inject_weight.weight"] = (config.hc_count, streams)
    return shapes


def ple_shapes(config: DemoConfig) -> Shapes:
    """Return the shapes of the n-gram embedding."""
    hidden, streams = config.hidden_size, config.hc_count * config.hidden_size
    return {
        "ple_embedding.ngram_embedding.weight": (config.ngram_table_rows, config.ngram_row_width),
        "key_proj.weight": (streams, hidden),
        "value_proj.weight": (hidden, hidden),
        "norm_key.weight": (streams,),
        "norm_query.weight": (streams,),
        "norm_conv.weight": (streams,),
        "conv1d.weight": (streams, 1, config.ple_conv_kernel_size),
    }


def attention_shapes(config: DemoConfig) -> Shapes:
    """Return the shapes of a QSA layer."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    index_rows = (config.indexer_n_heads + 1) * config.indexer_head_dim
    return {
        "q_proj.weight": (2 * queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "q_norm.weight": (head,),
        "k_norm.weight": (head,),
        "indexer.index_qk_proj.weight": (index_rows, hidden),
        "indexer.q_layernorm.weight": (config.indexer_head_dim,),
        "indexer.k_layernorm.weight": (config.indexer_head_dim,),
    }


def gdn_shapes(config: DemoConfig) -> Shapes:
    """Return the shapes of a gated delta net layer."""
    hidden, dim, heads = (
        config.hidden_size,
        config.linear_key_head_dim,
        config.linear_num_value_heads,
    )
    keys, values = config.linear_num_key_heads * dim, heads * dim
    return {
        "in_proj_qkv.weight": (2 * keys + values, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_a.weight": (heads, hidden),
        "in_proj_b.weight": (heads, hidden),
        "conv1d.weight": (2 * keys + values, 1, config.linear_conv_kernel_dim),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (dim,),
        "out_proj.weight": (hidden, values),
    }


def moe_shapes(config: DemoConfig) -> Shapes:
    """Return the shapes of a mixture of experts."""
    hidden, experts = config.hidden_size, config.num_experts
    width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * width, hidden),
        "experts.down_proj": (experts, hidden, width),
        "shared_expert_gate.weight": (1, hidden),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
    }
