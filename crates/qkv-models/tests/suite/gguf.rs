//! GGUF files: a small one is made byte by byte and read back; malformed ones are refused.

use super::devices::devices;
use proptest::prelude::*;
use qkv_models::chat::Message;
use qkv_models::files::gguf::Gguf;
use qkv_models::{Generation, Generator, Inspection};
use qkv_nn::Machine;

/// A file under construction.
#[derive(Default)]
pub struct Maker {
    pub values: Vec<Vec<u8>>,
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Maker {
    pub fn value(&mut self, name: &str, kind: u32, bytes: &[u8]) {
        self.values.push([&text(name)[..], &kind.to_le_bytes(), bytes].concat());
    }

    pub fn whole(&mut self, name: &str, value: u32) {
        self.value(name, 4, &value.to_le_bytes());
    }

    pub fn float(&mut self, name: &str, value: f32) {
        self.value(name, 6, &value.to_le_bytes());
    }

    pub fn word(&mut self, name: &str, word: &str) {
        self.value(name, 8, &text(word));
    }

    pub fn list(&mut self, name: &str, kind: u32, items: &[Vec<u8>]) {
        let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
        self.value(name, 9, &[head, items.concat()].concat());
    }

    /// A tensor of 8-bit blocks, or of plain numbers if it has one axis.
    pub fn tensor(&mut self, name: &str, shape: &[u64]) {
        let count: u64 = shape.iter().product();
        let (kind, bytes) = match shape {
            [_] => (0, vec![1.0f32.to_le_bytes(); count as usize].concat()),
            _ => {
                let block = |at: u64| {
                    let scale = half::f16::from_f32(0.01).to_le_bytes();
                    let numbers = (0..32u64).map(|x| (((at * 32 + x) * 7919 % 199) as i64 - 99) as i8 as u8);
                    scale.into_iter().chain(numbers).collect::<Vec<u8>>()
                };
                (8, (0..count / 32).flat_map(block).collect())
            }
        };
        self.tensors.push((name.to_owned(), shape.to_vec(), kind, bytes));
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.values.len() as u64).to_le_bytes());
        head.extend(self.values.concat());
        let mut data: Vec<u8> = Vec::new();
        for (name, shape, kind, bytes) in &self.tensors {
            head.extend(text(name));
            head.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|axis| head.extend(axis.to_le_bytes()));
            head.extend(kind.to_le_bytes());
            head.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        head.resize(head.len().next_multiple_of(32), 0);
        [head, data].concat()
    }
}

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}";

/// A Llama of one layer with a tokenizer of bytes.
fn small() -> Maker {
    let mut maker = Maker::default();
    maker.word("general.architecture", "llama");
    for (name, value) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ] {
        maker.whole(&format!("llama.{name}"), value);
    }
    maker.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
    maker.word("tokenizer.ggml.model", "gpt2");
    maker.word("tokenizer.ggml.pre", "smollm");
    // Every byte as a character, as in GPT-2.
    let seen = |b: &u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let hidden: Vec<u32> = (0..256).filter(|b| !seen(b)).collect();
    let letter = |b: u32| match hidden.iter().position(|&h| h == b) {
        Some(at) => char::from_u32(256 + at as u32).unwrap(),
        None => char::from_u32(b).unwrap(),
    };
    let mut tokens = vec!["<|endoftext|>".to_owned(), "<|im_start|>".into(), "<|im_end|>".into()];
    tokens.extend((0..256).map(|b| letter(b).to_string()));
    tokens.push("he".into());
    let kinds: Vec<Vec<u8>> =
        (0..tokens.len()).map(|at| (if at < 3 { 3i32 } else { 1 }).to_le_bytes().to_vec()).collect();
    let count = tokens.len() as u64;
    maker.list("tokenizer.ggml.tokens", 8, &tokens.iter().map(|token| text(token)).collect::<Vec<_>>());
    maker.list("tokenizer.ggml.token_type", 5, &kinds);
    maker.list("tokenizer.ggml.merges", 8, &[text("h e")]);
    maker.whole("tokenizer.ggml.bos_token_id", 1);
    maker.whole("tokenizer.ggml.eos_token_id", 2);
    maker.word("tokenizer.chat_template", TEMPLATE);
    // Axes in the order of the format, the fastest first.
    maker.tensor("token_embd.weight", &[32, count]);
    for (name, shape) in [
        ("attn_norm", &[32][..]),
        ("attn_q", &[32, 32]),
        ("attn_k", &[32, 16]),
        ("attn_v", &[32, 16]),
        ("attn_output", &[32, 32]),
        ("ffn_norm", &[32]),
        ("ffn_gate", &[32, 64]),
        ("ffn_up", &[32, 64]),
        ("ffn_down", &[64, 32]),
    ] {
        maker.tensor(&format!("blk.0.{name}.weight"), shape);
    }
    maker.tensor("output_norm.weight", &[32]);
    maker
}

pub fn opened(bytes: &[u8]) -> qkv_models::Result<Generator> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    let _ = Inspection::of(&path);
    Generator::open(&path)
}

#[test]
fn a_small_model_speaks_and_its_cache_changes_nothing() {
    // In f32, because decoding from blocks rounds activations to 16 bits, unlike a pass over whole sequences.
    let folder = tempfile::tempdir().unwrap();
    let quantized = opened(&small().bytes()).unwrap();
    quantized.save(folder.path(), qkv_models::files::tensors::Storage::F32).unwrap();
    let generator = Generator::open(folder.path()).unwrap();
    assert_eq!(generator.tokenizer.encode("the 12"), [119, 259, 35, 52, 53], "merged, and digits one by one");
    let ids = generator.conversation(&[Message::new("user", "he<|im_end|>")]).unwrap();
    assert_eq!((ids[0], ids.iter().filter(|&&id| id == 2).count()), (1, 1), "what is said stays text: {ids:?}");
    let how = Generation { max_tokens: 90, ..Generation::default() };
    let machine = Machine::new(2);
    let said = |how: &Generation| {
        let mut heard = String::new();
        let found = generator
            .generate(&ids, how, &machine, &mut |piece| {
                heard += piece;
                true
            })
            .unwrap();
        assert_eq!(heard, found.text);
        found
    };
    let cached = said(&how);
    assert_eq!(cached.tokens, said(&Generation { cache: false, ..how.clone() }).tokens, "beyond the 64 it takes, too");
    assert_eq!(cached.tokens, said(&how).tokens);
    let other = Generation { sample: how.sample.map(|s| qkv_models::Sampling { seed: 9, ..s }), ..how.clone() };
    assert_ne!(cached.tokens, said(&other).tokens);
    // The caller can stop it early.
    let mut count = 0;
    let found = generator.generate(&ids, &how, &machine, &mut |_| {
        count += 1;
        count < 3
    });
    assert_eq!((found.unwrap().finish, count), (qkv_models::Finish::Cancelled, 3));
}

#[test]
fn a_model_written_as_a_folder_is_the_same_model_and_chats() {
    let generator = opened(&small().bytes()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    generator.save(folder.path(), qkv_models::files::tensors::Storage::F32).unwrap();
    let again = Generator::open(folder.path()).unwrap();
    let messages = [Message::new("user", "he")];
    let ids = generator.conversation(&messages).unwrap();
    assert_eq!(ids, again.conversation(&messages).unwrap());
    let machine = Machine::new(1);
    let [blocks, widened] = [&generator, &again].map(|model| model.scores(&ids, &machine).unwrap());
    let largest = widened.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let apart = blocks.iter().zip(&widened).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart <= 1e-5 * largest, "{apart} apart, the largest is {largest}");
}

#[test]
fn rows_of_queries_and_keys_are_put_in_our_order() {
    let generator = opened(&small().bytes()).unwrap();
    let file = Gguf::from_bytes(small().bytes(), "m.gguf").unwrap();
    let theirs = file.read("blk.0.attn_k.weight").unwrap();
    let name = "layers.0.self_attn.k_proj.weight";
    let ours = generator.parameters.get(generator.parameters.find(name).unwrap());
    // The rows of each head of eight come from rows 0, 2, 4, 6, 1, 3, 5, 7.
    let row = |all: &[f32], at: usize| all[at * 32..][..32].to_vec();
    for (at, from) in [0, 2, 4, 6, 1, 3, 5, 7].into_iter().enumerate() {
        assert_eq!(row(ours, at), row(&theirs, from), "row {at}");
        assert_eq!(row(ours, 8 + at), row(&theirs, 8 + from), "row {at} of the second head");
    }
}

pub fn refused(bytes: &[u8], said: &str) {
    let error = opened(bytes).expect_err(said).to_string();
    assert!(error.contains("m.gguf") && error.contains(said), "{error}");
}

#[test]
fn lengths_that_lie_are_refused_before_memory_is_asked_for() {
    let whole = small().bytes();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    refused(&with(0, b"GGML"), "does not begin with `GGUF`");
    refused(&with(4, &1u32.to_le_bytes()), "version 1");
    refused(&with(8, &u64::MAX.to_le_bytes()), "bytes are announced");
    refused(&with(16, &u64::MAX.to_le_bytes()), "m.gguf");
    refused(&with(24, &u64::MAX.to_le_bytes()), "18446744073709551615 bytes are announced");
    refused(&whole[..whole.len() - 64], "go beyond the file");
    refused(&whole[..200], "bytes are announced");
    let mut maker = small();
    maker.list("x", 8, &[]);
    let mut bytes = maker.values.pop().unwrap();
    let end = bytes.len();
    bytes[end - 8..].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
    maker.values.insert(0, bytes);
    refused(&maker.bytes(), "value `x`");
    let mut maker = small();
    maker.list("x", 9, &[vec![0; 12]]);
    refused(&maker.bytes(), "a list of values of type 9");
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let change = |name: &str, shape: &[u64]| {
        let mut maker = small();
        let at = maker.tensors.iter().position(|(found, ..)| found == name).unwrap();
        maker.tensor(name, shape);
        maker.tensors.swap_remove(at);
        maker.bytes()
    };
    refused(
        &change("blk.0.ffn_up.weight", &[32, 32]),
        "tensor `blk.0.ffn_up.weight`: its shape is [32, 32], expected [64, 32]",
    );
    let mut maker = small();
    maker.tensors[1].1 = vec![u64::MAX, u64::MAX];
    refused(&maker.bytes(), "tensor `blk.0.attn_norm.weight`");
    let mut maker = small();
    maker.tensors[2].2 = 16;
    refused(&maker.bytes(), "it is stored as type 16");
    let mut maker = small();
    maker.tensors[2].1 = vec![31, 32];
    refused(&maker.bytes(), "cannot be stored as Q8_0");
    let mut maker = small();
    maker.tensors.remove(3);
    refused(&maker.bytes(), "tensor `blk.0.attn_k.weight`: it is missing");
    let mut maker = small();
    maker.tensor("rope_freqs.weight", &[4]);
    refused(&maker.bytes(), "tensor `rope_freqs.weight`: the model has no such parameter");
    let mut maker = small();
    let twice = maker.tensors[1].clone();
    maker.tensors.push(twice);
    refused(&maker.bytes(), "it is there twice");
}

#[test]
fn few_tokens_read_blocks_and_many_the_widened_numbers_to_the_same_scores() {
    let generator = opened(&small().bytes()).unwrap();
    let (tokens, machine): (Vec<u32>, _) = ((0..12).map(|at| 3 + at * 7).collect(), Machine::new(2));
    let many = generator.scores(&tokens, &machine).unwrap();
    // Activations are rounded to 16 bits.
    let bound = 1e-3 * many.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for count in 1..5 {
        let few = generator.scores(&tokens[..count], &machine).unwrap();
        let apart = few.iter().zip(&many).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < bound, "{count}: {apart}, at most {bound}");
    }
    let one_by_one = generator.scores_one_by_one(&tokens, &machine).unwrap();
    assert_eq!(one_by_one.len(), many.len());
    let apart = one_by_one.iter().zip(&many).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart < bound, "one by one: {apart}, at most {bound}");
    let long = vec![3; generator.model.max_len() + 1];
    assert!(generator.scores_one_by_one(&long, &machine).is_err());
}

#[test]
fn a_device_decodes_from_blocks_what_the_cpu_decodes_from_their_values() {
    // Heads of width eight, whose queries and keys a device rotates separately from the product, and of width sixteen.
    for heads in [[4, 2], [2, 1]] {
        let mut maker = small();
        for (name, count) in ["llama.attention.head_count", "llama.attention.head_count_kv"].into_iter().zip(heads) {
            maker.values.retain(|bytes| !bytes.starts_with(&text(name)));
            maker.whole(name, count);
        }
        // Some of the matrices in blocks of 4 bits.
        for (_, _, kind, bytes) in maker.tensors.iter_mut().filter(|(name, ..)| name.contains("attn_q")) {
            let block = |block: &[u8]| block[..18].to_vec();
            (*kind, *bytes) = (2, bytes.chunks_exact(34).flat_map(block).collect());
        }
        let generator = opened(&maker.bytes()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        generator.save(folder.path(), qkv_models::files::tensors::Storage::F32).unwrap();
        let widened = Generator::open(folder.path()).unwrap();
        let prompts: Vec<Vec<u32>> = ["the 12", "a", "he said so"].map(|text| widened.tokenizer.encode(text)).into();
        let settings = Generation { sample: None, max_tokens: 9, ..Generation::default() };
        for operations in devices(qkv_cuda::Dtype::F32) {
            let (device, cpu) = (Machine::new(1).on_cuda(operations), Machine::new(1));
            let [found, expected] = [(&generator, &device), (&widened, &cpu)].map(|(model, machine)| {
                let mut all = vec![Vec::new(); prompts.len()];
                let mut receive = |number: usize, text: qkv_models::Generated| {
                    all[number] = text.tokens;
                    true
                };
                model.generate_all(&prompts, &settings, 3, machine, &mut receive).unwrap();
                let alone = model.generate(&prompts[0], &settings, machine, &mut |_| true).unwrap();
                assert_eq!(alone.tokens, all[0], "alone and among three");
                all
            });
            assert_eq!(found, expected, "{heads:?} heads");
            let [found, expected] = [(&generator, &device), (&widened, &cpu)]
                .map(|(model, machine)| model.scores(&prompts[2], machine).unwrap());
            let bound = 1e-4 * expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= bound), "{heads:?} heads");
        }
    }
}

#[test]
fn settings_that_make_no_model_are_refused() {
    for (name, value) in [("block_count", u32::MAX), ("embedding_length", 60_000), ("attention.head_count", 0)] {
        let mut maker = small();
        let name = format!("llama.{name}");
        maker.values.retain(|bytes| !bytes.starts_with(&text(&name)));
        maker.whole(&name, value);
        assert!(opened(&maker.bytes()).is_err(), "{name}");
    }
    let mut maker = small();
    maker.values.remove(0);
    maker.word("general.architecture", "rwkv");
    refused(&maker.bytes(), "it is `rwkv`");
    let mut maker = small();
    maker.values.retain(|bytes| !bytes.starts_with(&text("tokenizer.ggml.merges")));
    maker.list("tokenizer.ggml.merges", 8, &[text("not there")]);
    refused(&maker.bytes(), "is not in the vocabulary");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_changed_nothing_panics(at in 0usize..9000, with in any::<[u8; 3]>(), keep in 0usize..20_000) {
        let mut bytes = small().bytes();
        let at = at % (bytes.len() - 3);
        bytes[at..at + 3].copy_from_slice(&with);
        bytes.truncate(keep);
        if let Ok(file) = Gguf::from_bytes(bytes, "m.gguf") {
            let names: Vec<String> = file.names().map(str::to_owned).collect();
            names.iter().for_each(|name| drop(file.read(name)));
        }
    }
}
