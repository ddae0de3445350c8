//! A small GGUF file: a one-layer Llama with tensors of several types and a tokenizer with few pieces.

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn list(kind: u32, items: &[Vec<u8>]) -> Vec<u8> {
    [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(items.len() as u64).to_le_bytes(), &items.concat()].concat()
}

fn word(value: &str) -> Vec<u8> {
    [&8u32.to_le_bytes()[..], &text(value)].concat()
}

fn whole(value: u32) -> Vec<u8> {
    [4u32.to_le_bytes(), value.to_le_bytes()].concat()
}

/// The bytes of `count` numbers of a type.
fn numbers(kind: u32, count: u64) -> Vec<u8> {
    let (together, each) = match kind {
        0 => (1, 4),
        1 | 30 => (1, 2),
        2 => (32, 18),
        6 => (32, 22),
        _ => (32, 34),
    };
    (0..count / together * each).map(|at| (at * 37 % 64) as u8).collect()
}

pub fn gguf() -> Vec<Vec<u8>> {
    let mut values: Vec<(String, Vec<u8>)> = vec![("general.architecture".into(), word("llama"))];
    for (name, value) in [
        ("block_count", 1),
        ("context_length", 32),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ] {
        values.push((format!("llama.{name}"), whole(value)));
    }
    let epsilon = [&6u32.to_le_bytes()[..], &1e-5f32.to_le_bytes()].concat();
    values.push(("llama.attention.layer_norm_rms_epsilon".into(), epsilon));
    let tokens: Vec<Vec<u8>> = ["<|endoftext|>", "<|im_end|>", "h", "e", "l", "o", "he", "Ġ"].map(text).to_vec();
    let kinds: Vec<Vec<u8>> = [3i32, 3, 1, 1, 1, 1, 1, 1].map(|kind| kind.to_le_bytes().to_vec()).to_vec();
    let count = tokens.len() as u64;
    for (name, value) in [
        ("tokenizer.ggml.model", word("gpt2")),
        ("tokenizer.ggml.pre", word("smollm")),
        ("tokenizer.ggml.tokens", list(8, &tokens)),
        ("tokenizer.ggml.token_type", list(5, &kinds)),
        ("tokenizer.ggml.merges", list(8, &[text("h e")])),
        ("tokenizer.ggml.bos_token_id", whole(0)),
        ("tokenizer.ggml.eos_token_id", whole(1)),
        ("tokenizer.chat_template", word("{{ messages[0].content }}")),
    ] {
        values.push((name.into(), value));
    }
    let mut tensors: Vec<(String, Vec<u64>, u32)> =
        vec![("token_embd.weight".into(), vec![32, count], 8), ("output_norm.weight".into(), vec![32], 0)];
    for (name, shape, kind) in [
        ("attn_norm", &[32][..], 0),
        ("attn_q", &[32, 32], 2),
        ("attn_k", &[32, 16], 6),
        ("attn_v", &[32, 16], 8),
        ("attn_output", &[32, 32], 1),
        ("ffn_norm", &[32], 30),
        ("ffn_gate", &[32, 32], 8),
        ("ffn_up", &[32, 32], 8),
        ("ffn_down", &[32, 32], 8),
    ] {
        tensors.push((format!("blk.0.{name}.weight"), shape.to_vec(), kind));
    }
    let mut head = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((values.len() as u64).to_le_bytes());
    values.iter().for_each(|(name, value)| head.extend([text(name), value.clone()].concat()));
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, kind) in &tensors {
        head.extend(text(name));
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|axis| head.extend(axis.to_le_bytes()));
        head.extend(kind.to_le_bytes());
        head.extend((data.len() as u64).to_le_bytes());
        data.extend(numbers(*kind, shape.iter().product()));
        data.resize(data.len().next_multiple_of(32), 0);
    }
    head.resize(head.len().next_multiple_of(32), 0);
    vec![[head, data].concat()]
}
