//! A custom mask built with `&`, `|` and `!`, printed and counted: `cargo run --release -p qkv --example custom_mask`.

use qkv::{Attention, Inputs, Mask, MaskData, Tensor};

fn main() -> qkv::Result<()> {
    // Causal: the eight tokens before, every tenth token before that, and the first two always; never token 5.
    let recent = Mask::window(8, 0);
    let every_tenth = Mask::dilated(1000, 10);
    let first = Mask::longformer(0, [0, 1]);
    let fifth = Mask::longformer(0, [5]) & !Mask::window(0, 0);
    let mask = Mask::causal() & (recent | every_tenth | first) & !fifth;

    let data = MaskData::new(32, 32);
    for i in 0..32 {
        let row = (0..32).map(|j| Ok(if mask.allows(i, j, &data)? { '■' } else { '·' }));
        println!("{}", row.collect::<qkv::Result<String>>()?);
    }

    // Engines visit the tiles that the mask leaves, and no others.
    let x = Tensor::<f32, 4>::randn([1, 1, 8192, 32], 1);
    let attention = Attention::scaled_dot().mask(mask);
    let tiles = attention.tiles(Inputs::new(&x, &x, &x))?;
    println!("of 8,192 tokens: {} tiles empty, {} partial, {} full", tiles.empty, tiles.partial, tiles.full);
    let out = attention.forward(Inputs::new(&x, &x, &x))?;
    println!("output {:?}", out.values.shape());
    Ok(())
}
