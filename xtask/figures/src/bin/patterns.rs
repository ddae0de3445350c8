//! Draws the pattern of each mask, read from the library's own weights:
//! `cargo run -p figures --bin patterns > docs/patterns.svg`.

use qkv::{Attention, BigBird, Blocks, Inputs, Lsh, Mask, Tensor, segments_of};

/// Tokens per side, and points per token.
const TOKENS: usize = 48;
const CELL: usize = 4;

fn main() -> qkv::Result<()> {
    let x = Tensor::<f32, 4>::randn([1, 1, TOKENS, 4], 3);
    let lsh = Lsh { buckets: 6, rounds: 1, seed: 2 };
    let buckets = lsh.hash(&x)?;
    let segments = segments_of(&[0, 12, 20, TOKENS])?;
    let bigbird = BigBird { block: 4, window: 3, globals: 1, random: 1, seed: 4 };
    let checkered =
        Blocks { size: 8, seen: (0..6).map(|r| (0..6).map(|c| (r + c) % 3 == 0 || c == r).collect()).collect() };
    let named = [
        ("full", Mask::full()),
        ("causal", Mask::causal()),
        ("window(8, 0)", Mask::causal() & Mask::window(8, 0)),
        ("causal segments", Mask::segments() & Mask::causal()),
        ("strided(7)", Mask::causal() & Mask::strided(7)),
        ("fixed(8, 1)", Mask::causal() & Mask::fixed(8, 1)),
        ("longformer(8, [0, 1, 30])", Mask::longformer(8, [0, 1, 30])),
        ("bigbird", Mask::bigbird(bigbird)),
        ("blocks", Mask::blocks(checkered)),
        ("lsh", Mask::lsh(lsh)),
    ];
    let (columns, side) = (5, TOKENS * CELL);
    let (step_x, step_y) = (side + 24, side + 40);
    let (width, height) = (columns * step_x + 16, named.len().div_ceil(columns) * step_y + 8);
    println!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">"#
    );
    println!(r##"<rect width="100%" height="100%" fill="#ffffff"/>"##);
    println!(r##"<style>text{{font:14px ui-sans-serif,system-ui,sans-serif;fill:#334155}}</style>"##);
    for (at, (name, mask)) in named.into_iter().enumerate() {
        let (left, top) = (16 + at % columns * step_x, 30 + at / columns * step_y);
        let mut inputs = Inputs::new(&x, &x, &x);
        if name == "causal segments" {
            inputs = inputs.segments(&segments, &segments);
        }
        if name == "lsh" {
            inputs = inputs.buckets(&buckets, &buckets);
        }
        let attention = Attention::scaled_dot().mask(mask);
        let out = attention.forward(inputs)?;
        let weights = attention.weights(inputs, &out)?.rows(0, 0, 0..TOKENS)?;
        println!(r#"<text x="{left}" y="{}">{name}</text>"#, top - 8);
        println!(r##"<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="#eef2f7"/>"##);
        for i in 0..TOKENS {
            // One rectangle per run of keys that the query sees.
            let mut j = 0;
            while j < TOKENS {
                let run = (j..TOKENS).take_while(|&j| weights[[i, j]] > 0.0).count();
                if run > 0 {
                    let (x, y) = (left + j * CELL, top + i * CELL);
                    println!(r##"<rect x="{x}" y="{y}" width="{}" height="{CELL}" fill="#2563eb"/>"##, run * CELL);
                }
                j += run + 1;
            }
        }
    }
    println!("</svg>");
    Ok(())
}
