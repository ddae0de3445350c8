//! Scratch.
use qkv::{Attention, Mask};
use qkv_models::*;
use qkv_nn::layers::*;
use qkv_nn::*;
use std::time::Instant;
fn rss() -> u64 {
    let s = std::fs::read_to_string("/proc/self/status").unwrap();
    s.lines().find(|l| l.starts_with("VmHWM")).unwrap().split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        / 1024
}
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let threads: usize = args[2].parse().unwrap();
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().unwrap();
    let precision = if args.get(3).is_some_and(|x| x == "bf16") { Precision::Bf16 } else { Precision::F32 };
    let (pool, machine) = (Pool::<f32>::new(), Machine::new(threads).precision(precision));
    let mut ms = Vec::new();
    if args[1] == "gpt" {
        let (v, c, l, h, t, b) = (8000, 256, 4, 4, 128, 16);
        let mut p = Parameters::<f32>::new();
        let mut at = Builder::new(&mut p, 1);
        let emb = Embedding::new(&mut at.at("tok"), v, c, PositionKind::Learned, t).unscaled();
        let cfg = BlockConfig {
            width: c,
            inner: 4 * c,
            activation: Activation::Gelu,
            norm: NormPlace::Pre,
            dropout: 0.0,
            inner_dropout: 0.0,
            own: AttentionConfig::new(Attention::scaled_dot().mask(Mask::causal()), Heads { query: h, key: h }),
            cross: None,
        };
        let blocks: Vec<_> = (0..l).map(|i| Block::new(&mut at.at(&format!("l{i}")), &cfg).unwrap()).collect();
        let norm = LayerNorm::new(&mut at.at("norm"), c);
        let head = Linear::new(&mut at.at("head"), c, v, false);
        let x: Vec<u32> = (0..b * t).map(|i| ((i * 7919 + 13) % v) as u32).collect();
        let y: Vec<u32> = (0..b * t).map(|i| ((i * 104729 + 7) % v) as u32).collect();
        println!("{} params", p.count());
        let (mut g, mut m) = (Gradients::of(&p), Moments::of(&p));
        for s in 0..12 {
            let t0 = Instant::now();
            g.clear();
            let mut tape = Tape::training(&p, &mut g, &pool, &machine, s);
            let mut hh = emb.forward(&mut tape, &x, t, 0);
            for bl in &blocks {
                hh = bl.forward(&mut tape, hh, None, None).unwrap();
            }
            let n = norm.forward(&mut tape, &hh);
            drop(hh);
            let t1 = Instant::now();
            let loss = tape.cross_entropy(
                &n,
                head.weight,
                None,
                Target { ids: &y, ignore: None, smoothing: 0.0, scale: 1.0 / (b * t) as f64 },
            );
            drop(n);
            let t2 = Instant::now();
            tape.backward();
            drop(tape);
            let t3 = Instant::now();
            AdamW::default().step(&mut p, &g, &mut m, 1e-3, 1.0, &machine);
            if s == 11 {
                println!(
                    "loss {} fwd {:?} head {:?} bwd {:?} adam {:?}",
                    loss.nll / loss.rows as f64,
                    t1 - t0,
                    t2 - t1,
                    t3 - t2,
                    t3.elapsed()
                );
            }
            ms.push(t0.elapsed().as_secs_f64() * 1e3);
        }
    } else {
        let specials = Specials { pad: 7999, bos: 1, eos: 2 };
        let cfg = TransformerConfig { dropout: 0.3, attention_dropout: 0.3, ffn_dropout: 0.3, ..Default::default() };
        let arch =
            if args[1] == "mt" { Architecture::Transformer(cfg) } else { Architecture::Recurrent(Default::default()) };
        let (model, mut p) = Model::new::<f32>(&ModelConfig::new(arch, 8000, specials), 1).unwrap();
        let (b, t, v) = (128, 16, 8000);
        let row = |f: &dyn Fn(usize) -> usize| Rows {
            ids: (0..b * t).map(|i| (f(i) % v) as u32).collect(),
            lengths: vec![t; b],
            length: t,
        };
        let batch = Batch {
            source: row(&|i| i * 7919 + 13),
            shown: row(&|i| i * 104729 + 7),
            wanted: row(&|i| i * 15485863 + 5).ids,
        };
        println!("{} params", p.count());
        let (mut g, mut m) = (Gradients::of(&p), Moments::of(&p));
        for s in 0..12 {
            let t0 = Instant::now();
            g.clear();
            let mut tape = Tape::training(&p, &mut g, &pool, &machine, s);
            let loss = model.loss(&mut tape, &batch, 0.1, 1.0 / (b * t) as f64).unwrap();
            let t2 = Instant::now();
            tape.backward();
            drop(tape);
            let t3 = Instant::now();
            AdamW::default().step(&mut p, &g, &mut m, 1e-3, 1.0, &machine);
            if s == 11 {
                println!(
                    "loss {} fwd+head {:?} bwd {:?} adam {:?}",
                    loss.nll / loss.rows as f64,
                    t2 - t0,
                    t3 - t2,
                    t3.elapsed()
                );
            }
            ms.push(t0.elapsed().as_secs_f64() * 1e3);
        }
    }
    let mut s = ms[2..].to_vec();
    s.sort_by(f64::total_cmp);
    println!("best {:.0} median {:.0} rss {} MB", s[0], s[5], rss());
}
