//! Low-rank adapters and chat tuning, on models that are trained here in seconds.

use crate::models::program::{Folder, json};

fn recipe(data: &str, model: &str, more: &str) -> String {
    format!(
        "name = 'tiny'\n[data]\n{data}\n[tokenizer]\nkind = 'bpe'\nsize = 300\n[model]\n{model}\n[train]\nsteps = 40\ntokens = 256\n\
         longest = 32\nlr = 1e-2\nwarmup = 4\nschedule = 'constant'\nsmoothing = 0.0\naverage = 0.0\nmetric = 'loss'\n\
         validate = 20\nsave = 20\nlog = 10\n{more}"
    )
}

const LLAMA: &str = "kind = 'gpt'\nd_model = 32\nffn_dim = 64\nheads = 4\nkey_heads = 2\nlayers = 2\nmax_positions = 64\n\
                     positions = 'rotary'\nnorm = 'rms'\nactivation = 'swiglu'\nbias = false";
const TEXT: &str = "text = 'text.txt'\ndev = 'text.txt'";
const OTHER: &str = "text = 'other.txt'\ndev = 'other.txt'";

/// A folder with a small language model, and a text of another kind.
fn based() -> Folder {
    let folder = Folder::new();
    let text: String = (0..200).map(|at| format!("the ferry number {at} leaves at noon\n")).collect();
    let other: String = (0..200).map(|at| format!("no ferry leaves at {at}, said the number\n")).collect();
    folder.put("text.txt", text.as_bytes());
    folder.put("other.txt", other.as_bytes());
    folder.put("base.toml", recipe(TEXT, LLAMA, "").as_bytes());
    folder.qkv("train base.toml --out base --quiet --threads 2").well();
    folder
}

fn perplexity(folder: &Folder, model: &str) -> f64 {
    let scores = folder.qkv(&format!("eval {model} other.txt --json --threads 2")).quietly();
    json(&scores)[0]["perplexity"].as_f64().unwrap()
}

#[test]
fn adapters_are_trained_alone_resumed_kept_apart_and_merged() {
    let folder = based();
    let before = perplexity(&folder, "--model base");
    for (name, more) in [
        ("lora", "[lora]\nrank = 4\nalpha = 8\ndropout = 0.1\ntargets = ['all-linear']\n"),
        ("qlora", "[lora]\nrank = 4\nalpha = 8\nbits = 8\ntargets = ['q_proj', 'mlp.down_proj', 'layers.1.*']\n"),
    ] {
        folder.put("lora.toml", recipe(OTHER, "from = 'base'", more).as_bytes());
        let log = folder.qkv(&format!("train lora.toml --out {name} --log-format plain --threads 2"));
        assert!(log.err.contains("of them trained") && log.err.contains("0 added"), "{}", log.err);
        log.well();
        let files = |file: &str| folder.path().join(name).join(file).exists();
        assert!(files("adapter_model.safetensors") && files("adapter_config.json") && !files("model.safetensors"));
        let after = perplexity(&folder, &format!("--model {name}"));
        assert!(after < 0.8 * before, "{name}: {after} {before}");
        // Evaluated over the base itself, not over rounded blocks.
        let apart = perplexity(&folder, &format!("--model base --adapter {name}"));
        assert!((apart / after - 1.0).abs() < 1e-6, "{name}: {apart} {after}");
        folder.qkv(&format!("convert base --adapter {name} --out merged-{name}")).quietly();
        let merged = perplexity(&folder, &format!("--model merged-{name}"));
        assert!((merged / after - 1.0).abs() < 1e-4, "{name}: {merged} {after}");
        // A resumed run ends with the same bytes; a checkpoint holds only adapters.
        folder.qkv(&format!("train lora.toml --out parts-{name} --quiet --threads 1 --set train.steps=20")).well();
        folder.qkv(&format!("train --resume parts-{name} --quiet --threads 2 --set train.steps=40")).well();
        let weights = "checkpoints/00000040/weights.safetensors";
        let [whole, parts] = ["", "parts-"].map(|start| folder.bytes(&format!("{start}{name}/{weights}")));
        assert!(whole == parts && !whole.is_empty(), "{name}");
        assert!(whole.windows(6).any(|x| x == b"lora_A") && !whole.windows(13).any(|x| x == b"tokens.weight"));
    }
    // A run is not resumed on a base that has changed.
    folder.put("base.toml", recipe(TEXT, LLAMA, "").as_bytes());
    folder.qkv("train base.toml --out base2 --quiet --seed 9").well();
    std::fs::copy(folder.path().join("base2/model.safetensors"), folder.path().join("base/model.safetensors")).unwrap();
    let resumed = folder.qkv("train --resume lora --quiet --set train.steps=50");
    resumed.fails(&["the frozen parameters are not those that the run was started with"]);
}

#[test]
fn over_a_base_in_16_bits_adapters_are_those_over_its_widened_numbers() {
    let folder = based();
    folder.qkv("convert base --storage bf16 --out base16").quietly();
    folder.qkv("convert base16 --out base32").quietly();
    let lora = "[lora]\nrank = 4\nalpha = 8\ntargets = ['all-linear']\n";
    let runs = [("base16", ""), ("base32", ""), ("base", "bits = 16\n")].map(|(base, bits)| {
        for precision in ["f32", "bf16"] {
            let more = format!("precision = '{precision}'\n{lora}{bits}");
            folder.put("lora.toml", recipe(OTHER, &format!("from = '{base}'"), &more).as_bytes());
            folder.qkv(&format!("train lora.toml --out {base}-{precision} --quiet --threads 2")).well();
        }
        ["f32", "bf16"].map(|precision| folder.bytes(&format!("{base}-{precision}/adapter_model.safetensors")))
    });
    assert!(runs[0] == runs[1], "in 16 bits and widened");
    // `bits` does not round embeddings and norms, so the adapters differ, but learn as much.
    assert!(runs[2] != runs[0]);
    let [rounded, whole] = ["base-f32", "base32-f32"].map(|run| perplexity(&folder, &format!("--model {run}")));
    assert!((rounded / whole - 1.0).abs() < 0.02, "{rounded} {whole}");
}

#[test]
fn what_is_frozen_or_slow_is_said_in_the_recipe() {
    let folder = based();
    let trained = |more: &str| {
        folder.put("r.toml", recipe(OTHER, "from = 'base'", more).as_bytes());
        let plan = folder.qkv("train r.toml --dry-run --json");
        json(&plan.well())[0]["trained"].as_u64().unwrap()
    };
    let all = trained("");
    assert!(trained("last_layers = 1\n") < trained("freeze = ['embeddings']\n"));
    assert!(trained("freeze = ['embeddings']\n") < all);
    assert_eq!(trained("layer_decay = 0.5\nrecompute = true\n"), all);
    assert_eq!(trained("[lora]\nrank = 2\ntargets = ['self_attn.q_proj']\n"), 2 * 2 * (32 + 32));
    let refused = |more: &str, words: &[&str]| {
        folder.put("r.toml", recipe(OTHER, "from = 'base'", more).as_bytes());
        folder.qkv("train r.toml --dry-run").fails(words);
    };
    refused("freeze = ['layer.7']\n", &["`train.freeze` has `layer.7`", "hint: "]);
    refused("freeze = ['*']\n", &["everything is frozen"]);
    refused("[lora]\ntargets = ['query']\n", &["`lora.targets` has `query`", "hint: `q_proj`"]);
    refused("[lora]\nrank = 64\n", &["`lora.rank` is 64"]);
    refused("[lora]\nbits = 3\n", &["`lora.bits` is 3, expected 4, 8 or 16"]);
    refused("last_layers = 1\n[lora]\n", &["cannot be set beside `[lora]`"]);
    // Recomputed layers give bit-identical weights.
    for (name, recompute) in [("once", false), ("twice", true)] {
        let more = format!("recompute = {recompute}\n");
        let text = recipe(OTHER, "from = 'base'\ndropout = 0.1\nattention_dropout = 0.1", &more);
        folder.put("r.toml", text.as_bytes());
        folder.qkv(&format!("train r.toml --out {name} --quiet --threads 2")).well();
    }
    assert!(folder.bytes("once/model.safetensors") == folder.bytes("twice/model.safetensors"));
}

#[test]
fn an_encoder_is_adapted_with_a_new_head() {
    let folder = Folder::new();
    let films: String = (0..40)
        .map(|at| {
            let (label, word) = [("good", "lovely"), ("bad", "dreadful")][at % 2];
            format!("{label}\tthe film number {at} was {word} to see\n")
        })
        .collect();
    folder.put("text.txt", films.as_bytes());
    folder.put("films", films.as_bytes());
    let encoder =
        "kind = 'encoder'\nd_model = 32\nffn_dim = 64\nheads = 2\nlayers = 2\nmax_positions = 40\ndropout = 0.0";
    // Pretrained with masked language modeling.
    folder.put("mlm.toml", recipe(TEXT, encoder, "objective = 'mlm'\n").as_bytes());
    let log = folder.qkv("train mlm.toml --out mlm --log-format json --threads 2");
    let losses: Vec<f64> =
        json(&log.err).iter().filter(|x| x["event"] == "validation").map(|x| x["loss"].as_f64().unwrap()).collect();
    assert!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");
    log.well();
    assert!(folder.qkv("inspect mlm").quietly().contains("cls.predictions.transform.dense.weight"));
    let lora =
        recipe("classes = 'films'\ndev = 'films'", "from = 'mlm'", "[lora]\nrank = 2\ntargets = ['query', 'value']\n");
    folder.put("lora.toml", lora.replace("'loss'", "'exact'").replace("steps = 40", "steps = 100").as_bytes());
    let log = folder.qkv("train lora.toml --out lora --log-format plain --threads 2");
    assert!(log.err.contains("added: bert.pooler.dense.weight"), "{}", log.err);
    assert!(log.err.contains("accuracy 100.00 %"), "{}", log.err);
    log.well();
    let out = folder.qkv_on("classify --model lora", "the film was lovely to see\n").quietly();
    assert!(out.starts_with("good\t"), "{out}");
    assert_eq!(out, folder.qkv_on("classify --model mlm --adapter lora", "the film was lovely to see\n").quietly());
    folder.qkv("convert mlm --adapter lora --out merged").quietly();
    assert!(folder.qkv("eval --model merged films").quietly().contains("accuracy = 100.00 %"));
}

/// Conversations with one answer for each word.
fn conversations() -> String {
    let pairs = [("alpha", "one"), ("beta", "two"), ("gamma", "three"), ("delta", "four")];
    let line = |at: usize| {
        let (word, code) = pairs[at % 4];
        let asked = [format!("the code of {word}"), format!("{word} has which code")][at / 4 % 2].clone();
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{asked}\"}}, \
             {{\"role\": \"assistant\", \"content\": \"it is {code}\"}}]}}\n"
        )
    };
    (0..240).map(line).collect()
}

#[test]
fn a_chat_tune_changes_the_answers_as_intended() {
    let folder = Folder::new();
    // The words, without anything that is to be learned.
    let words = "the user has which code of alpha beta gamma delta\nassistant it is one two three four\n";
    let text = words.repeat(60);
    folder.put("text.txt", text.as_bytes());
    folder.put("chat.jsonl", conversations().as_bytes());
    folder.put("base.toml", recipe(TEXT, LLAMA, "").as_bytes());
    folder.qkv("train base.toml --out base --quiet --threads 2").well();
    let chat = "chat = 'chat.jsonl'\ndev = 'chat.jsonl'";
    folder.put("chat.toml", recipe(chat, "from = 'base'", "").as_bytes());
    folder.qkv("train chat.toml --out none").fails(&["the model has no chat template", "hint: "]);
    let template = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}\
                    {% if add_generation_prompt %}<s>assistant\n{% endif %}";
    folder.put("base/chat_template.jinja", template.as_bytes());
    let ask = |model: &str, text: &str| {
        folder
            .typed(&["generate", "--model", model, "--chat", "--greedy", "--quiet", "--max-tokens", "12", text], "")
            .well()
    };
    assert!(!ask("base", "the code of beta").contains("it is two"));
    for (name, more) in [
        ("whole", "steps = 120\n"),
        ("packed", "steps = 120\npack = true\n"),
        ("lora", "steps = 200\npack = true\n[lora]\nrank = 8\ntargets = ['all-linear']\n"),
    ] {
        let text = recipe(chat, "from = 'base'", more).replacen("steps = 40\n", "", 1);
        let text = text.replace("longest = 32", "longest = 64");
        folder.put("chat.toml", text.as_bytes());
        let log = folder.qkv(&format!("train chat.toml --out {name} --log-format plain --threads 2"));
        assert!(log.err.contains("240 conversations with"), "{}", log.err);
        log.well();
        for (asked, answer) in [("the code of beta", "it is two"), ("delta has which code", "it is four")] {
            assert_eq!(ask(name, asked).trim(), answer, "{name}");
        }
    }
    folder.put("chat.jsonl", b"{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n");
    folder.qkv("train chat.toml --out bad").fails(&["chat.jsonl:1: no message is the assistant's"]);
    folder.put("chat.jsonl", b"{\"message\": 3}\n");
    folder.qkv("train chat.toml --out bad").fails(&["chat.jsonl:1: "]);
}
