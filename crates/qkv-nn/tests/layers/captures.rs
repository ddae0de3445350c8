//! Captured attentions carry the labels of their layers.

use qkv::{Attention, Mask};
use qkv_nn::layers::{AttentionConfig, Block, BlockConfig, Builder};
use qkv_nn::{Heads, Machine, Parameters, Pool, Tape, Tensor};

fn decoder() -> (Vec<Block>, Parameters<f32>) {
    let attention = |attention| AttentionConfig::new(attention, Heads { query: 2, key: 1 });
    let own = attention(Attention::scaled_dot().mask(Mask::causal()));
    let config = BlockConfig { cross: Some(attention(Attention::scaled_dot())), ..BlockConfig::new(8, 8, own) };
    let mut parameters = Parameters::new();
    let mut at = Builder::new(&mut parameters, 1);
    let blocks = (0..2).map(|layer| Block::new(&mut at.at(&format!("decoder.layers.{layer}")), &config).unwrap());
    (blocks.collect(), parameters)
}

fn labels(capture: impl FnOnce(&mut Tape<'_, f32>)) -> Vec<String> {
    let (blocks, parameters) = decoder();
    let (pool, machine) = (Pool::new(), Machine::new(1));
    let mut tape = Tape::inference(&parameters, &pool, &machine);
    capture(&mut tape);
    let [mut x, memory] = [3, 5].map(|length| tape.constant(Tensor::new(vec![0.1; length * 8], &[1, length, 8])));
    for block in &blocks {
        x = block.forward(&mut tape, x, None, None, Some((&memory, None))).unwrap();
    }
    let captured = tape.captured();
    for capture in &captured {
        let keys = if capture.label().ends_with("encoder_attn") { 5 } else { 3 };
        assert_eq!(capture.shape(), [1, 2, 3, keys], "{}", capture.label());
    }
    assert!(tape.captured().is_empty(), "they are taken once");
    captured.iter().map(|capture| capture.label().to_owned()).collect()
}

#[test]
fn a_captured_attention_is_named_after_its_layer() {
    let all = ["0.self_attn", "0.encoder_attn", "1.self_attn", "1.encoder_attn"];
    assert_eq!(labels(|tape| tape.capture()), all.map(|name| format!("decoder.layers.{name}")));
}

#[test]
fn only_the_wanted_attentions_are_captured() {
    let wanted = "decoder.layers.1.encoder_attn";
    assert_eq!(labels(|tape| tape.capture_where(move |label| label == wanted)), [wanted]);
    assert!(labels(|_| ()).is_empty());
}
