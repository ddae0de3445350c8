//! The page for a document, an image, a sound and a voice, with models that are trained here in seconds, or not at all.

use crate::explore::browser::Browser;
use crate::explore::program::Serving;
use qkv_models::audio::{Recording, wav};
use qkv_models::files::tensors::Storage;
use qkv_models::{Recognizer, TranscribeOptions, WhisperConfig};
use qkv_nn::Machine;
use std::path::Path;
use std::process::Command;

fn train(folder: &Path, recipe: &str) {
    std::fs::write(folder.join("r.toml"), recipe).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_qkv"));
    let ran = command.current_dir(folder).args(["train", "r.toml", "--out", "m", "--quiet"]).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn a_document_is_shaded_on_both_levels() {
    let folder = tempfile::tempdir().unwrap();
    let line = |at: usize| {
        let (label, word) = [("good", "lovely"), ("bad", "dreadful")][at % 2];
        format!("{label}\tthe plot is long . <s> it was {word} to see <s> number {at}\n")
    };
    let lines: String = (0..40).map(line).collect();
    std::fs::write(folder.path().join("data"), lines).unwrap();
    train(
        folder.path(),
        "name = 'tiny'\n[data]\nclasses = 'data'\ndev = 'data'\n[tokenizer]\nkind = 'words'\nsize = 60\n[model]\nkind = 'han'\n\
         d_model = 16\nhidden = 8\nattention_width = 8\ndropout = 0.0\n[train]\nsteps = 60\ntokens = 256\nlr = 1e-2\nwarmup = 10\n\
         smoothing = 0.0\naverage = 0.0\nmetric = 'exact'\nvalidate = 30\nsave = 60\n",
    );
    let model = folder.path().join("m").display().to_string();
    let serving = Serving::start(&["--model", &model, "The plot is long. It was lovely to see!"]);
    let mut browser = Browser::open(&serving.url);
    assert!(browser.text("#output").starts_with("good "), "{}", browser.text("#output"));
    // Two sentences; the weights of both levels match the server's, and sum to 1.
    assert_eq!(browser.eval("document.querySelectorAll('.sentence').length"), 2);
    let shares = browser.numbers("/api/runs/0/weights?layer=0&head=0");
    assert!((shares.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let drawn = browser.eval("[...document.querySelectorAll('.sentence')].map((s) => Number(s.dataset.weight))");
    assert!((drawn[1].as_f64().unwrap() as f32 - shares[1]).abs() < 1e-6, "{drawn} {shares:?}");
    let words = browser.numbers("/api/runs/0/weights?layer=1&head=0&rows=1..2");
    let drawn =
        browser.eval("Number(document.querySelector('.sentence:nth-child(2) .word:nth-child(3)').dataset.weight)");
    assert!((drawn.as_f64().unwrap() as f32 - words[5 + 2]).abs() < 1e-6, "{drawn} {words:?}");
    assert!(words[..5].iter().all(|&weight| weight == 0.0), "a sentence sees its own words alone: {words:?}");
    // Clicking a word opens the derivation of its weight.
    browser.click(".sentence:nth-child(2) .word:nth-child(3)");
    browser.until("!document.querySelector('#pair').hidden && document.querySelector('#pair .result')");
    browser.press("Escape");
    browser.until("document.querySelector('#pair').hidden");
    browser.click("[data-shade=words]");
    browser.until("location.hash.includes('shade=words')");
    // The heatmap is available, too.
    browser.press("2");
    browser.until("document.querySelector('.view canvas.cells')");
    // Another document.
    browser.press("/");
    browser.until("document.activeElement.id === 'text'");
    browser.write("It was dreadful.");
    browser.press("Enter");
    browser.until("document.querySelector('#output').textContent.startsWith('bad')");
    browser.is_content();
}

#[test]
fn weights_lie_over_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let header = |axes: &[u32]| {
        let mut bytes = vec![0, 0, 8, axes.len() as u8];
        axes.iter().for_each(|axis| bytes.extend(axis.to_be_bytes()));
        bytes
    };
    let points = |right: bool| -> Vec<u8> { (0..64).map(|at| if (at % 8 >= 4) == right { 220 } else { 20 }).collect() };
    let (mut images, mut labels) = (header(&[40, 8, 8]), header(&[40]));
    for at in 0..40 {
        images.extend(points(at % 2 == 1));
        labels.push((at % 2) as u8);
    }
    std::fs::write(folder.path().join("images"), images).unwrap();
    std::fs::write(folder.path().join("labels"), labels).unwrap();
    train(
        folder.path(),
        "name = 'tiny'\n[data]\nimages = 'images'\nlabels = 'labels'\ndev_images = 'images'\ndev_labels = 'labels'\n\
         names = ['left', 'right']\n[model]\nkind = 'vit'\npatch_size = 2\nd_model = 16\nffn_dim = 32\nheads = 2\nlayers = 2\n\
         dropout = 0.0\n[train]\nsteps = 40\ntokens = 170\nlr = 5e-3\nwarmup = 10\nsmoothing = 0.0\naverage = 0.0\n\
         metric = 'exact'\nvalidate = 20\nsave = 40\n",
    );
    for (name, right) in [("left.png", false), ("right.png", true)] {
        let file = std::fs::File::create(folder.path().join(name)).unwrap();
        let mut encoder = png::Encoder::new(file, 8, 8);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header().unwrap().write_image_data(&points(right)).unwrap();
    }
    let path = |name: &str| folder.path().join(name).display().to_string();
    let serving = Serving::start(&["--model", &path("m"), "--image", &path("left.png"), "--image", &path("right.png")]);
    let mut browser = Browser::open(&serving.url);
    assert!(browser.text("#output").starts_with("left "), "{}", browser.text("#output"));
    // Pointing at a patch shows the class token's weight on it, as the server gives it.
    let weights = browser.numbers("/api/runs/0/weights?layer=0&head=0&rows=0..1");
    let middle = browser.middle(".seen.over");
    browser.point([middle[0] + 4.0, middle[1] + 4.0]); // the patch in row 2, column 2
    browser.until("document.querySelector('.status').textContent.includes('patch 2·2')");
    let status = browser.text(".status");
    assert!(
        status.starts_with("the class token attends to")
            && status.ends_with(&crate::explore::program::shown(weights[11])),
        "{status}"
    );
    // Every head has a thumbnail; clicking one shows that head.
    browser.until("document.querySelectorAll('.one').length === 6");
    browser.click(".one:nth-child(5)");
    browser.until("location.hash.includes('layer=1') && location.hash.includes('head=1')");
    // Rollout through the layers.
    browser.click("[data-way=rollout]");
    browser.until("document.querySelector('[data-way=rollout]').getAttribute('aria-pressed') === 'true'");
    // Clicking a patch makes it the query.
    browser.click(".seen.over");
    browser.until("document.querySelector('.status').textContent.startsWith('patch ')");
    // The other image.
    browser.eval("(() => { const s = document.querySelector('#text'); s.selectedIndex = 1; s.dispatchEvent(new Event('change')); })()");
    browser.until("document.querySelector('#output').textContent.startsWith('right')");
    browser.is_content();
}

#[test]
fn words_stand_against_time() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = WhisperConfig {
        bands: 8,
        audio_positions: 50,
        text_positions: 32,
        d_model: 16,
        encoder_heads: 2,
        decoder_heads: 2,
        encoder_layers: 1,
        decoder_layers: 1,
        encoder_ffn: 16,
        decoder_ffn: 16,
        vocabulary: 0,
    };
    let sound = |length: usize| {
        let samples: Vec<f32> = (0..length).map(|at| (at as f32 * 0.05).sin() * 0.4).collect();
        wav::to_bytes(&samples, 16_000)
    };
    // Untrained models write anything; this picks one that begins with two different words.
    let begins_with_two = |model: &Recognizer| {
        let recording = Recording::from_bytes(sound(12_800), "a.wav");
        let listened = model.listen(&recording, &TranscribeOptions::default(), &Machine::new(1));
        listened.is_ok_and(|listened| matches!(&listened.words[..], [(a, _), (b, _), ..] if a.word != b.word))
    };
    let mut models = (1..500).map(|seed| Recognizer::untrained(&sizes, seed).unwrap());
    let model = models.find(begins_with_two).expect("a model that writes two words");
    model.save(folder.path().join("m"), Storage::F32).unwrap();
    for (name, length) in [("a.wav", 12_800), ("b.wav", 9600)] {
        std::fs::write(folder.path().join(name), sound(length)).unwrap();
    }
    let path = |name: &str| folder.path().join(name).display().to_string();
    let serving = Serving::start(&["--model", &path("m"), "--audio", &path("a.wav"), "--audio", &path("b.wav")]);
    let mut browser = Browser::open(&serving.url);
    // The first word is marked, with its time.
    browser.until(
        "document.querySelector('canvas.sound') && document.querySelector('.status').textContent.includes(' s, with ')",
    );
    let first = browser.text(".status");
    // Another one by the keyboard.
    browser.eval("document.querySelector('canvas.sound').focus()");
    browser.press("ArrowDown");
    browser.until(&format!("document.querySelector('.status').textContent !== {}", serde_json::json!(first)));
    // One head instead of those that follow the sound.
    browser.click("[data-way=head]");
    browser.until("document.querySelector('[data-way=head]').getAttribute('aria-pressed') === 'true'");
    // The other sound.
    browser.eval("(() => { const s = document.querySelector('#text'); s.selectedIndex = 1; s.dispatchEvent(new Event('change')); })()");
    browser.until("location.hash.includes('b.wav') && document.querySelector('canvas.sound')");
    browser.is_content();
}

#[test]
fn letters_stand_against_seconds() {
    let folder = tempfile::tempdir().unwrap();
    train(
        folder.path(),
        "name = 'tiny'\n[data]\ntones = 4\ndev_tones = 2\n[tokenizer]\nkind = 'characters'\n[model]\nkind = 'voice'\n\
         d_model = 16\nffn_dim = 16\nheads = 2\nencoder_layers = 1\ndecoder_layers = 1\nmax_steps = 30\n\
         [train]\nsteps = 4\ntokens = 100\nlongest = 100\nmetric = 'loss'\nvalidate = 4\nsave = 4\n",
    );
    let model = folder.path().join("m").display().to_string();
    let serving = Serving::start(&["--model", &model, "abc"]);
    let mut browser = Browser::open(&serving.url);
    assert_eq!(browser.text("#prompt .go"), "Speak");
    let is_offered = "[...document.querySelectorAll('button')].some((b) => b.textContent === 'set the output')";
    assert_eq!(browser.eval(is_offered), false, "a voice has no text to set");
    // The output is the sound's length; the heatmap has a row per moment and a column per letter.
    let run = browser.eval("fetch('/api/runs/0').then((r) => r.json())");
    let texts = |side: usize| -> Vec<String> {
        let tokens = run["sides"][side]["tokens"].as_array().unwrap();
        tokens.iter().map(|token| token["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts(0), ["a", "b", "c", "</s>"]);
    let steps = texts(1).len();
    assert!(steps > 0 && texts(1)[0] == "0.00", "{:?}", texts(1));
    assert!(browser.text("#output").ends_with(" s"), "{}", browser.text("#output"));
    assert!(browser.text("body").contains("rows: seconds · columns: letters"));
    let layers = run["layers"].as_array().unwrap();
    let cross = layers.iter().position(|layer| layer["group"] == "cross").unwrap();
    let weights = browser.numbers(&format!("/api/runs/0/weights?layer={cross}&head=0"));
    assert_eq!(weights.len(), steps * 4);
    for row in weights.chunks(4) {
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{row:?}");
    }
    // Another text, and a letter that the voice has not learned.
    browser.press("/");
    browser.until("document.activeElement.id === 'text'");
    browser.eval("document.querySelector('#text').value = ''");
    browser.write("fed");
    // The input line is rebuilt once the requested run arrives.
    browser.eval("document.querySelector('#text').dataset.old = '1'");
    browser.press("Enter");
    browser.until("location.hash.includes('text=fed') && !document.querySelector('#text').dataset.old");
    browser.is_content();
    browser.press("/");
    browser.until("document.activeElement.id === 'text'");
    browser.eval("document.querySelector('#text').value = ''");
    browser.write("xyz");
    browser.press("Enter");
    browser.until("document.body.textContent.includes('has not learned the letter `x`')");
}
