//! Embeds the model in `model/`, if there is one; the program builds without.

use std::path::Path;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(embedded_model)");
    println!("cargo::rerun-if-changed=model");
    let files = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"];
    if files.iter().all(|file| Path::new("model").join(file).exists()) {
        println!("cargo::rustc-cfg=embedded_model");
    }
}
