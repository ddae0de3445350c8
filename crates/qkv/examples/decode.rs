//! A decoding loop of grouped-query attention against a growing cache:
//! `cargo run --release -p qkv --example decode`.

use qkv::{Attention, Cache, Decode, Inputs, Mask, OutputMut, Scratch, Tensor};

fn main() -> qkv::Result<()> {
    let (batch, query_heads, key_heads, d) = (1, 8, 2, 64); // four query heads share a key head
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let mut cache = Cache::<f32>::new(batch, key_heads, d, d);

    // The prompt: all its tokens at once.
    let prompt = 100;
    let q = Tensor::<f32, 4>::randn([batch, query_heads, prompt, d], 1);
    let [k, v] = [2, 3].map(|seed| Tensor::<f32, 4>::randn([batch, key_heads, prompt, d], seed));
    cache.append(&k, &v)?;
    let out = causal.decode(Inputs::new(&q, cache.keys(), cache.values()), Decode::Fast)?;
    println!("prompt: {:?}", out.values.shape());

    // Then a token at a time, into memory that is reused.
    let scratch = Scratch::new();
    let mut values = Tensor::<f32, 4>::zeros([batch, query_heads, 1, d])?;
    let mut lse = Tensor::<f32, 4>::zeros([batch, query_heads, 1, 1])?;
    for step in 0..20 {
        let q = Tensor::<f32, 4>::randn([batch, query_heads, 1, d], 10 + 3 * step);
        let [k, v] = [11, 12].map(|seed| Tensor::<f32, 4>::randn([batch, key_heads, 1, d], seed + 3 * step));
        cache.append(&k, &v)?;
        let inputs = Inputs::new(&q, cache.keys(), cache.values());
        let into = OutputMut::new(&mut values, &mut lse);
        causal.decode_into(inputs, into, Decode::Fast, &scratch, rayon::current_num_threads())?;
    }
    println!("{} tokens in the cache; last output starts with {}", cache.len(), values[[0, 0, 0, 0]]);
    Ok(())
}
