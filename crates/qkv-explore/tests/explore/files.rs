//! Recordings as files: our own are read back, those of other programs are understood, and false claims are refused.

use qkv::{Attention, Bias, Inputs, Mask, OwnedInputs, Tensor};
use qkv_explore::file::{self, OpenOptions};
use qkv_explore::{AttentionCall, Layer, Recording, Side, WeightSource, explain};
use std::path::Path;

/// An attention layer with the inputs that its description needs.
fn layer(attention: Attention, mut inputs: OwnedInputs<f32>) -> Layer {
    let heads = inputs.q.shape()[1];
    if attention.sinks {
        inputs.sinks = Some(vec![0.5; heads]);
    }
    let output = attention.forward(inputs.inputs()).expect("it holds together");
    let weights = WeightSource::Call(Box::new(AttentionCall::new(attention, inputs, Some(output))));
    Layer { name: "layers.0".into(), group: "layers".into(), queries: 0, keys: 0, weights, importance: None }
}

fn recording(layers: Vec<Layer>) -> Recording {
    let n = layers[0].size()[0];
    let sides = vec![Side::numbered("tokens", n)];
    Recording { text: "a text".into(), output: None, sides, layers, steps: Vec::new(), form: None }
}

fn random(heads: usize, n: usize) -> OwnedInputs<f32> {
    let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, heads, n, 8], seed));
    OwnedInputs::new(q, k, v)
}

#[test]
fn what_is_written_is_read_again_to_the_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let causal = Attention::scaled_dot().mask(Mask::causal()).bias(Bias::alibi());
    let mut sunk = Attention::scaled_dot();
    sunk.sinks = true;
    let mut lengths = random(2, 9);
    lengths.lengths = Some(vec![7]);
    let layers = vec![
        layer(causal, random(2, 9)),
        layer(sunk, random(2, 9)),
        layer(Attention::scaled_dot().mask(Mask::lengths()), lengths),
        layer(Attention::scaled_dot().select(qkv::Select::TopK(3)), random(1, 9)),
    ];
    let before = recording(layers);
    file::save(&before, &path).expect("it can be written");
    let after = file::open(&path, &OpenOptions::default()).expect("it can be read");
    assert_eq!((&after.text, &after.sides), (&before.text, &before.sides));
    for (before, after) in before.layers.iter().zip(&after.layers) {
        for head in 0..before.heads() {
            assert_eq!(before.weights(head).expect("weights"), after.weights(head).expect("weights"));
        }
        assert_eq!(explain(before, 0, 3, 2).expect("a pair"), explain(after, 0, 3, 2).expect("a pair"));
    }
}

/// A file as other programs write it.
fn foreign(path: &Path, tensors: &[(&str, &[usize], &[f32])], metadata: &[(&str, &str)]) {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    let metadata: std::collections::BTreeMap<_, _> = metadata.iter().copied().collect();
    header.insert("__metadata__".into(), serde_json::to_value(metadata).expect("plain"));
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert((*name).into(), entry);
    }
    let json = serde_json::to_vec(&header).expect("plain");
    let bytes = [&(json.len() as u64).to_le_bytes()[..], &json, &data].concat();
    std::fs::write(path, bytes).expect("it can be written");
}

#[test]
fn recordings_of_earlier_versions_are_read() {
    // As version 0.1.0 wrote it: the names inside the file must not change.
    let header = r#"{"text":"a b","output":null,"sides":[{"name":"tokens","tokens":[{"text":"a","word":0,"special":false},
        {"text":"b","word":1,"special":false,"id":7}]}],"steps":[{"text":"b","probability":0.5,"candidates":
        [{"text":"b","probability":0.5}]}],"layers":[{"name":"layers.0.self_attn","group":"encoder","queries":0,"keys":0,
        "attention":{"score":"scaled-dot","scale":"own","temperature":null,"softcap":null,"bias":{"alibi":false,
        "tensor":false,"relative":null},"mask":"causal","place":"start","local":null,"select":"soft","dropout":null,
        "sinks":false,"entropy":false},
        "importance":[0.25]},{"name":"layers.1.self_attn","group":"encoder","queries":0,"keys":0,"attention":null,
        "importance":null}]}"#;
    let (folder, lse) = (tempfile::tempdir().expect("a folder"), [0.0f32, std::f32::consts::LN_2]);
    let path = folder.path().join("old.safetensors");
    let rows: (&[usize], &[f32]) = (&[1, 1, 2, 1], &[0.0, 0.0]);
    let tensors = [
        ("layers.0.q", rows.0, rows.1),
        ("layers.0.k", rows.0, rows.1),
        ("layers.0.v", rows.0, rows.1),
        ("layers.0.lse", &[1, 1, 2][..], &lse[..]),
        ("layers.1.weights", &[1, 2, 2][..], &[1.0, 0.0, 0.25, 0.75][..]),
    ];
    foreign(&path, &tensors, &[("recording", header)]);
    let read = file::open(&path, &OpenOptions::default()).expect("it is read");
    assert_eq!(read.layers[0].weights(0).expect("weights").data(), [1.0, 0.0, 0.5, 0.5]);
    assert_eq!(read.layers[1].weights(0).expect("weights").data(), [1.0, 0.0, 0.25, 0.75]);
    assert_eq!((read.sides[0].tokens[1].id, read.steps[0].candidates.len()), (Some(7), 1));
    assert_eq!(read.layers[0].importance, Some(vec![0.25]));
}

#[test]
fn queries_and_keys_of_others_give_the_weights_of_the_library() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("theirs.safetensors");
    let [q, k] = [1, 2].map(|seed| Tensor::<f32, 4>::randn([2, 3, 5, 4], seed));
    let shape: &[usize] = &[2, 3, 5, 4];
    let tokens = r#"["a","b","c","d","e"]"#;
    foreign(&path, &[("q", shape, q.data()), ("k", shape, k.data())], &[("tokens", tokens)]);
    let options = OpenOptions { sequence: 1, ..OpenOptions::default() };
    let read = file::open(&path, &options).expect("it can be read");
    let attention = Attention::scaled_dot();
    let out = attention.forward(Inputs::new(&q, &k, &k)).expect("it holds together");
    let expected = attention.weights(Inputs::new(&q, &k, &k), &out).expect("weights").rows(1, 2, 0..5).expect("rows");
    assert_eq!(read.layers[0].weights(2).expect("weights"), expected);
    assert_eq!(read.sides[0].tokens[4].text, "e");
    let none = file::open(&path, &OpenOptions { sequence: 2, ..OpenOptions::default() }).expect_err("there are two");
    assert!(none.to_string().contains("2 sequences"), "{none}");
}

#[test]
fn weights_of_others_are_taken_as_they_are_layer_by_layer() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("theirs.safetensors");
    let weights = [0.5f32, 0.5, 0.25, 0.75];
    let names: Vec<String> = (0..11).map(|layer| format!("model.layers.{layer}.weights")).collect();
    let shape: &[usize] = &[1, 1, 2, 2];
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), shape, &weights[..])).collect();
    foreign(&path, &tensors, &[]);
    let read = file::open(&path, &OpenOptions::default()).expect("it can be read");
    assert_eq!(read.layers.len(), 11);
    assert_eq!((read.layers[2].name.as_str(), read.layers[10].name.as_str()), ("model.layers.2", "model.layers.10"));
    assert_eq!(read.layers[3].weights(0).expect("weights").data(), weights);
    assert!(explain(&read.layers[0], 0, 0, 0).expect_err("nobody knows").to_string().contains("stores these weights"));
}

#[test]
fn what_lies_is_refused_with_the_tensor_that_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad.safetensors");
    let refused = |asked: &OpenOptions| file::open(&path, asked).expect_err("it lies").to_string();
    let (four, eight): (&[usize], &[usize]) = (&[1, 1, 2, 2], &[1, 1, 2, 4]);

    foreign(&path, &[("q", four, &[0.0; 4]), ("k", eight, &[0.0; 8])], &[]);
    assert!(refused(&OpenOptions::default()).contains("`k`"), "{}", refused(&OpenOptions::default()));
    foreign(&path, &[("other", four, &[0.0; 4])], &[]);
    assert!(refused(&OpenOptions::default()).contains("neither `q` and `k` nor `weights`"));
    foreign(&path, &[("q", four, &[0.0; 4])], &[]);
    assert!(refused(&OpenOptions::default()).contains("tensor `k`: it is missing"));
    foreign(&path, &[("weights", four, &[0.5, f32::NAN, 0.5, 0.5])], &[]);
    assert!(refused(&OpenOptions::default()).contains("a weight of NaN"));
    foreign(&path, &[("weights", four, &[0.5; 4])], &[("tokens", "[\"a\"]")]);
    assert!(refused(&OpenOptions::default()).contains("1 tokens for 2 positions"));
    foreign(&path, &[("weights", four, &[0.5; 4])], &[("recording", "{}")]);
    assert!(refused(&OpenOptions::default()).contains("metadata `recording`"));

    // Truncated files, and headers that make false claims.
    let good = {
        foreign(&path, &[("weights", four, &[0.5; 4])], &[]);
        std::fs::read(&path).expect("just written")
    };
    for cut in [0, 4, 8, 20, good.len() - 1] {
        std::fs::write(&path, &good[..cut]).expect("it can be written");
        refused(&OpenOptions::default());
    }
    let mut claims = good.clone();
    claims[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, &claims).expect("it can be written");
    assert!(refused(&OpenOptions::default()).contains("claims"));
    let text = String::from_utf8_lossy(&good).replace("[1,1,2,2]", "[1,1,9,9]");
    std::fs::write(&path, text.as_bytes()).expect("it can be written");
    assert!(refused(&OpenOptions::default()).contains("needs 324 bytes, not 0 to 16"));
}

#[test]
fn shapes_with_nothing_in_them_and_bytes_that_are_shared_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad.safetensors");
    let refused = || file::open(&path, &OpenOptions::default()).expect_err("it lies").to_string();
    for shape in [&[1usize << 40, 0][..], &[0, 4, 4], &[4, 0]] {
        foreign(&path, &[("weights", shape, &[])], &[]);
        assert!(refused().contains("with nothing in it"), "{}", refused());
    }
    let shape: &[usize] = &[2, 2];
    foreign(&path, &[("a.weights", shape, &[0.5; 4]), ("b.weights", shape, &[0.5; 4])], &[]);
    let mut bytes = std::fs::read(&path).expect("just written");
    let place = bytes.windows(7).position(|seven| seven == b"[16,32]").expect("the second tensor's place");
    bytes[place..place + 7].copy_from_slice(b"[ 8,24]");
    std::fs::write(&path, bytes).expect("it can be written");
    assert!(refused().contains("inside another tensor"), "{}", refused());
}

#[test]
fn a_log_sum_exp_of_another_attention_is_found_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("theirs.safetensors");
    let [q, k] = [1, 2].map(|seed| Tensor::<f32, 4>::randn([1, 1, 6, 4], seed));
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let lse = causal.forward(Inputs::new(&q, &k, &k)).expect("it holds together").lse;
    let (four, three): (&[usize], &[usize]) = (&[1, 1, 6, 4], &[1, 1, 6]);
    let tensors = [("q", four, q.data()), ("k", four, k.data()), ("lse", three, lse.data())];
    foreign(&path, &tensors, &[]);
    let error = file::open(&path, &OpenOptions::default()).expect_err("the future was not summed");
    assert!(error.hint().is_some_and(|hint| hint.contains("causal")), "{error}");
    let options = OpenOptions { attention: Some(causal.clone()), ..OpenOptions::default() };
    file::open(&path, &options).expect("told so, it fits");
    // The file's own description takes precedence over the options.
    let described = serde_json::to_string(&causal).expect("plain");
    foreign(&path, &tensors, &[("attention", &described)]);
    file::open(&path, &OpenOptions { attention: Some(Attention::dot()), ..OpenOptions::default() })
        .expect("as it is described");
}

#[test]
fn names_move_no_cursor_and_a_recording_is_not_told_what_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let mut named = recording(vec![layer(Attention::scaled_dot(), random(1, 4))]);
    named.layers[0].group = "\u{1b}[2Jx".into();
    file::save(&named, &path).expect("it can be written");
    assert_eq!(file::open(&path, &OpenOptions::default()).expect("it can be read").layers[0].group, "·[2Jx");
    let options = OpenOptions { sequence: 1, ..OpenOptions::default() };
    assert!(file::open(&path, &options).expect_err("it has one").to_string().contains("its own tokens"));
}
