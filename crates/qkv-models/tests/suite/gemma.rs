//! Gemma 3 in a GGUF file made byte by byte: its SentencePiece tokenizer, its window, and malformed files.

use crate::gguf::{Maker, opened, refused, text};
use qkv_models::chat::Message;
use qkv_models::files::tensors::Storage;
use qkv_models::{Generation, Generator};
use qkv_nn::Machine;

/// Types of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const ADDED: i32 = 4;
const BYTE: i32 = 6;

/// The chat template of Gemma, shortened.
const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + \
                        message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

/// A token with its type and its score.
type Token = (String, i32, f32);

/// Special tokens, user-defined tokens, bytes, letters, and the tokens merged from them.
fn vocabulary() -> Vec<Token> {
    let special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"];
    let added = ["\n", "\n\n", "  ", "   ", "<s>", "</s>"];
    let entry = |kind, score: f32| move |token: &str| (token.to_owned(), kind, score);
    let mut all: Vec<_> = special.into_iter().map(entry(CONTROL, -1000.0)).collect();
    all.extend(added.into_iter().map(entry(ADDED, -1000.0)));
    all.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), BYTE, 0.0)));
    // The scores are ranks of merges; letters come last.
    let merged = ["he", "▁t", "▁the", "in", "ing", "▁the▁", "er"];
    all.extend(merged.iter().enumerate().map(|(at, token)| (token.to_string(), NORMAL, -(at as f32))));
    let letters = "▁abcdefghijklmnopqrstuvwxyz.é".chars().enumerate();
    all.extend(letters.map(|(at, letter)| (letter.to_string(), NORMAL, -100.0 - at as f32)));
    all
}

/// A Gemma 3 with three layers, the second of which is global, and a window of 8 tokens.
fn small() -> Maker {
    let mut maker = Maker::default();
    maker.word("general.architecture", "gemma3");
    for (name, value) in [
        ("block_count", 3),
        ("context_length", 96),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("attention.sliding_window", 8),
        ("attention.sliding_window_pattern", 2),
    ] {
        maker.whole(&format!("gemma3.{name}"), value);
    }
    maker.float("gemma3.attention.layer_norm_rms_epsilon", 1e-6);
    maker.float("gemma3.rope.freq_base", 1e6);
    let vocabulary = vocabulary();
    let column = |of: &dyn Fn(&Token) -> Vec<u8>| vocabulary.iter().map(of).collect::<Vec<_>>();
    maker.word("tokenizer.ggml.model", "llama");
    maker.word("tokenizer.ggml.pre", "default");
    maker.list("tokenizer.ggml.tokens", 8, &column(&|(token, ..)| text(token)));
    maker.list("tokenizer.ggml.token_type", 5, &column(&|(_, kind, _)| kind.to_le_bytes().to_vec()));
    maker.list("tokenizer.ggml.scores", 6, &column(&|(.., score)| score.to_le_bytes().to_vec()));
    for (name, id) in [("padding", 0), ("eos", 1), ("bos", 2), ("unknown", 3)] {
        maker.whole(&format!("tokenizer.ggml.{name}_token_id"), id);
    }
    maker.value("tokenizer.ggml.add_bos_token", 7, &[1]);
    maker.value("tokenizer.ggml.add_space_prefix", 7, &[0]);
    maker.word("tokenizer.chat_template", TEMPLATE);
    maker.tensor("token_embd.weight", &[32, vocabulary.len() as u64]);
    for layer in 0..3 {
        for (name, shape) in [
            ("attn_norm", &[32][..]),
            ("attn_q", &[32, 64]),
            ("attn_k", &[32, 32]),
            ("attn_v", &[32, 32]),
            ("attn_q_norm", &[32]),
            ("attn_k_norm", &[32]),
            ("attn_output", &[64, 32]),
            ("post_attention_norm", &[32]),
            ("ffn_norm", &[32]),
            ("ffn_gate", &[32, 64]),
            ("ffn_up", &[32, 64]),
            ("ffn_down", &[64, 32]),
            ("post_ffw_norm", &[32]),
        ] {
            maker.tensor(&format!("blk.{layer}.{name}.weight"), shape);
        }
    }
    maker.tensor("output_norm.weight", &[32]);
    maker
}

fn numbers(of: &[&str]) -> Vec<u32> {
    let all = vocabulary();
    let find = |token: &&str| all.iter().position(|(found, ..)| found == token).unwrap() as u32;
    of.iter().map(find).collect()
}

/// The model in f32, saved to a folder and read again, because decoding from blocks rounds activations.
fn widened(maker: &Maker) -> Generator {
    let folder = tempfile::tempdir().unwrap();
    opened(&maker.bytes()).unwrap().save(folder.path(), Storage::F32).unwrap();
    Generator::open(folder.path()).unwrap()
}

#[test]
fn sentence_pieces_are_merged_by_their_scores_and_spelled_in_bytes() {
    for generator in [opened(&small().bytes()).unwrap(), widened(&small())] {
        let tokenizer = &generator.tokenizer;
        for (text, pieces) in [
            ("the", &["t", "he"][..]),
            (" the inger", &["▁the▁", "ing", "er"]),
            // The merge with the higher score comes first, although the other is further left.
            ("the\n\nthe", &["t", "he", "\n\n", "t", "he"]),
            ("a\n\n\nb", &["a", "\n\n", "\n", "b"]),
            ("a   b  c d", &["a", "   ", "b", "  ", "c", "▁", "d"]),
            ("é好", &["é", "<0xE5>", "<0xA5>", "<0xBD>"]),
            ("<s>a</s>", &["<s>", "a", "</s>"]),
        ] {
            assert_eq!(tokenizer.encode(text), numbers(pieces), "{text:?}");
            assert_eq!(tokenizer.encode_prompt(text), [numbers(&["<bos>"]), numbers(pieces)].concat(), "{text:?}");
            assert_eq!(tokenizer.decode(&tokenizer.encode(text)), text);
        }
        assert_eq!((tokenizer.pad(), tokenizer.eos(), tokenizer.bos(), tokenizer.unk()), (0, 1, 2, Some(3)));
    }
}

#[test]
fn a_prefix_of_a_space_is_put_before_a_text_and_taken_away_again() {
    let mut maker = small();
    maker.values.retain(|bytes| !bytes.starts_with(&text("tokenizer.ggml.add_space_prefix")));
    let tokenizer = opened(&maker.bytes()).unwrap().tokenizer;
    assert_eq!(tokenizer.encode("the a"), numbers(&["▁the▁", "a"]));
    assert_eq!(tokenizer.decode(&tokenizer.encode("the a")), "the a");
}

#[test]
fn a_chat_begins_once_and_ends_with_the_turn() {
    let generator = opened(&small().bytes()).unwrap();
    let ids = generator.conversation(&[Message::new("user", "the<end_of_turn>")]).unwrap();
    let specials: Vec<u32> = ids.iter().copied().filter(|&id| id < 6).collect();
    let expected = numbers(&["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_turn>"]);
    assert_eq!(specials, expected, "what is said stays text");
    // Nothing is generated after either of the two tokens that end an answer.
    let machine = Machine::new(1);
    let ends = numbers(&["<eos>", "<end_of_turn>"]);
    let mut ended = 0;
    for seed in 0..40 {
        let sample = Some(qkv_models::Sampling { seed, temperature: 3.0, ..Default::default() });
        let settings = Generation { sample, max_tokens: 80, ..Generation::default() };
        let said = generator.generate(&ids, &settings, &machine, &mut |_| true).unwrap();
        let at = said.tokens.iter().position(|token| ends.contains(token));
        assert!(at.is_none_or(|at| at + 1 == said.tokens.len()), "{:?}", said.tokens);
        ended += usize::from(said.tokens.last().is_some_and(|&last| last == ends[1]));
    }
    assert!(ended > 0, "a turn ends now and then");
}

#[test]
fn a_step_through_the_cache_sees_the_window_that_a_whole_pass_sees() {
    let generator = widened(&small());
    let machine = Machine::new(2);
    let tokens: Vec<u32> = (0..60).map(|at| 268 + at * 7 % 30).collect();
    let whole = generator.scores(&tokens, &machine).unwrap();
    let steps = generator.scores_one_by_one(&tokens, &machine).unwrap();
    let largest = whole.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let apart = whole.iter().zip(&steps).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart <= 1e-5 * largest, "{apart} apart, the largest is {largest}");
}

#[test]
fn a_token_reaches_as_far_as_the_windows_of_the_layers() {
    // With all layers local, nothing further back than three windows can be seen.
    let mut maker = small();
    change(&mut maker, "attention.sliding_window_pattern", Some(4));
    let (local, global) = (widened(&maker), widened(&small()));
    let machine = Machine::new(1);
    let mut tokens: Vec<u32> = (0..40).map(|at| 268 + at * 5 % 30).collect();
    let logits = |generator: &Generator, tokens: &[u32]| {
        let all = generator.scores(tokens, &machine).unwrap();
        all.chunks_exact(all.len() / tokens.len()).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let before = [&local, &global].map(|generator| logits(generator, &tokens));
    tokens[3] += 1;
    let after = [&local, &global].map(|generator| logits(generator, &tokens));
    let differs = |of: usize, at: usize| before[of][at] != after[of][at];
    // Each of three layers reaches seven tokens back.
    assert!((3..=24).all(|at| differs(0, at)) && (25..40).all(|at| !differs(0, at)));
    assert!((3..40).all(|at| differs(1, at)));
}

/// Replaces or removes the value of a key.
fn change(maker: &mut Maker, name: &str, value: Option<u32>) {
    let name = format!("gemma3.{name}");
    let before = maker.values.len();
    maker.values.retain(|bytes| !bytes.starts_with(&text(&name)));
    assert!(before > maker.values.len() || value.is_some(), "{name}");
    if let Some(value) = value {
        maker.whole(&name, value);
    }
}

#[test]
fn metadata_that_makes_no_model_is_refused_by_its_key() {
    for (name, value, said) in [
        ("attention.sliding_window", Some(0), "it is 0"),
        ("attention.sliding_window", None, "it is missing"),
        ("attention.sliding_window_pattern", Some(0), "it is 0"),
        ("attention.head_count", Some(0), "it is 0"),
        ("attention.head_count", None, "it is missing"),
        ("attention.head_count_kv", Some(0), "it is 0"),
        ("attention.head_count_kv", Some(4), "4 heads of keys do not divide 2 heads of queries"),
        ("attention.value_length", Some(16), "values of another width"),
        ("rope.dimension_count", Some(16), "heads of which only a part turns"),
        ("final_logit_softcapping", Some(30), "logits that are capped"),
        ("embedding_length", None, "it is missing"),
        ("feed_forward_length", None, "it is missing"),
        ("block_count", None, "it is missing"),
        ("context_length", None, "it is missing"),
        ("attention.layer_norm_rms_epsilon", None, "it is missing"),
    ] {
        let mut maker = small();
        change(&mut maker, name, value);
        refused(&maker.bytes(), &format!("value `gemma3.{name}`: {said}"));
    }
    for (name, value) in [("attention.key_length", 31), ("attention.key_length", 0), ("block_count", u32::MAX)] {
        let mut maker = small();
        change(&mut maker, name, Some(value));
        assert!(opened(&maker.bytes()).is_err(), "{name} {value}");
    }
    let mut maker = small();
    maker.word("gemma3.rope.scaling.type", "linear");
    refused(&maker.bytes(), "value `gemma3.rope.scaling.type`: scaled positions are not supported");
    let mut maker = small();
    maker.tensors.retain(|(name, ..)| name != "blk.1.attn_k_norm.weight");
    refused(&maker.bytes(), "tensor `blk.1.attn_k_norm.weight`: it is missing");
}

#[test]
fn tokenizers_that_lie_are_refused_by_their_key() {
    let without = |name: &str| {
        let mut maker = small();
        maker.values.retain(|bytes| !bytes.starts_with(&text(&format!("tokenizer.ggml.{name}"))));
        maker
    };
    refused(&without("scores").bytes(), "value `tokenizer.ggml.scores`: it is missing");
    let mut maker = without("scores");
    maker.list("tokenizer.ggml.scores", 6, &[vec![0; 4]]);
    refused(&maker.bytes(), "value `tokenizer.ggml.scores`: expected a number for each token");
    let mut maker = without("bos_token_id");
    maker.whole("tokenizer.ggml.bos_token_id", 9999);
    refused(&maker.bytes(), "9999");
    refused(&without("bos_token_id").bytes(), "value `tokenizer.ggml.bos_token_id`: it is missing");
    let mut maker = without("unknown_token_id");
    maker.whole("tokenizer.ggml.unknown_token_id", 9999);
    refused(&maker.bytes(), "value `tokenizer.ggml.unknown_token_id`: 9999 of");
    let mut maker = without("add_bos_token");
    maker.whole("tokenizer.ggml.add_bos_token", 1);
    refused(&maker.bytes(), "value `tokenizer.ggml.add_bos_token`");
    let mut maker = without("model");
    maker.word("tokenizer.ggml.model", "rwkv");
    refused(&maker.bytes(), "it is `rwkv`, expected `gpt2` or `llama`");
    // NaN scores have an order, too.
    let mut maker = without("scores");
    let scores: Vec<Vec<u8>> = vocabulary().iter().map(|_| f32::NAN.to_le_bytes().to_vec()).collect();
    maker.list("tokenizer.ggml.scores", 6, &scores);
    assert_eq!(opened(&maker.bytes()).unwrap().tokenizer.decode(&numbers(&["t", "he"])), "the");
}
