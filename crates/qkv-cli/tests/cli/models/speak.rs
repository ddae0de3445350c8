//! `qkv train` and `speak` with a voice, trained here in seconds on tones that the program makes.

use crate::models::program::{Folder, json};

const RECIPE: &str = "name = 'tiny'
[data]
tones = 4
dev_tones = 2
[tokenizer]
kind = 'characters'
[model]
kind = 'voice'
d_model = 16
ffn_dim = 16
heads = 2
encoder_layers = 1
decoder_layers = 1
max_steps = 30
[train]
steps = 4
tokens = 100
longest = 100
metric = 'loss'
validate = 4
save = 2
";

#[test]
fn a_text_is_spoken_with_its_alignment() {
    let folder = Folder::new();
    folder.put("tiny.toml", RECIPE.as_bytes());
    folder.qkv("train tiny.toml --out run --quiet --threads 2").quietly();
    folder.qkv("speak abc --voice run --out a.wav --iterations 2").well();
    assert!(folder.bytes("a.wav").starts_with(b"RIFF"));
    let found = folder.qkv("speak abc --voice run --json --drawing a.svg --iterations 1").well();
    let found = &json(&found)[0];
    assert_eq!((&found["text"], &found["letters"][0]), (&"abc".into(), &"a".into()));
    let alignment = found["alignment"].as_array().unwrap();
    assert!(alignment.iter().all(|row| row.as_array().unwrap().len() == 4));
    assert!(folder.text("a.svg").starts_with("<svg"));
    let drawn = folder.qkv_on("speak --voice run --alignment --iterations 0", "ab\n").well();
    assert!(drawn.starts_with("ab\n") && drawn.contains("largest"), "{drawn}");
    folder.qkv("speak xyz --voice run --out a.wav").fails(&["has not learned the letter `x`", "hint: "]);
    folder.qkv("speak abc --voice none --out a.wav").fails(&["none", "hint: "]);
    folder.qkv("speak abc --voice run").misused(&["`--out`"]);
    folder.qkv_on("speak --voice run --out a.wav", " \n").fails(&["there is nothing to say"]);
    assert!(folder.qkv("inspect run").quietly().contains("voice: 12 letters to 80 mel bands"));
    folder.comes_back("run");
    assert!(folder.qkv("show --model run abcdef").quietly().contains("cross"));

    // A resumed run ends the same.
    folder.qkv("train tiny.toml --out parts --quiet --threads 2 --set train.steps=2").quietly();
    folder.qkv("train --resume parts --quiet --threads 1 --set train.steps=4").quietly();
    let weights = "checkpoints/00000004/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{weights}")) == folder.bytes(&format!("run/{weights}")), "{weights}");
}
