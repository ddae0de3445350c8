//! Attacks on the program that once worked, or nearly did: hostile files, endless inputs, damaged models, kills. Each
//! must end in bounded time and memory with an exit code and a message, never with a panic.

use crate::models::program::{Folder, Ran, json, model};
use crate::run::program::{Input, noise, qkv};
use qkv_models::files::tensors::{NamedTensor, Storage, TensorFile, write};
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{Encoder, EncoderConfig};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest that any case may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `qkv` in a folder with 8 GB of address space, and kills it if it hangs.
fn attack(folder: &Folder, words: &[&str], stdin: &str) -> Ran {
    attack_with(folder, "ulimit -v 8000000", words, stdin)
}

/// The same, after a line of shell.
fn attack_with(folder: &Folder, setup: &str, words: &[&str], stdin: &str) -> Ran {
    folder.put("stdin", stdin.as_bytes());
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{setup}; exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_qkv")).args(words);
    command.current_dir(folder.path()).stdin(std::fs::File::open(folder.path().join("stdin")).unwrap());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut streams: [Box<dyn Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    let readers = streams.each_mut().map(|stream| std::mem::replace(stream, Box::new(std::io::empty())));
    let readers = readers.map(|mut stream| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            stream.read_to_end(&mut text).unwrap();
            String::from_utf8_lossy(&text).into_owned()
        })
    });
    let start = Instant::now();
    let code = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if start.elapsed() > PATIENCE => {
                child.kill().unwrap();
                panic!("{words:?} hangs");
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let [out, err] = readers.map(|reader| reader.join().unwrap());
    assert!(!err.contains("panicked"), "{words:?}: {err}");
    Ran { code, out, err }
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn non_finite_tensors_panic_in_no_selection() {
    let x = noise::<f32, 4>([1, 2, 5, 4], 1);
    for (at, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX].into_iter().enumerate() {
        for name in ["q", "k", "v", "bias"] {
            let mut numbers = if name == "bias" { vec![0.0; 25] } else { x.data().to_vec() };
            numbers[7] = bad;
            let shape: &[usize] = if name == "bias" { &[5, 5] } else { &[1, 2, 5, 4] };
            let file = Input::of(&x, &x, &x).tensor("d_out", &x).numbers(name, shape, &numbers);
            let folder = Folder::new();
            folder.put("in.safetensors", &file.bytes());
            for select in ["soft", "hard", "sample", "top-k:2", "sparsemax"] {
                let dtype = ["f32", "f64", "bf16", "f16"][at];
                let line = format!("run --input in.safetensors --select {select} --dtype {dtype} --threads 1");
                let ran = attack(&folder, &words(&line), "");
                assert!(matches!(ran.code, Some(0 | 1)), "{name} {bad} {line}: {ran:?}");
            }
        }
    }
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let [q, k, v] = qkv::<f32>();
    let bytes = Input::of(&q, &k, &v).bytes();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap().replace("\"k\":", "\"q\":");
    let folder = Folder::new();
    folder.put("in.safetensors", &[&bytes[..8], header.as_bytes(), &bytes[8 + length..]].concat());
    let ran = attack(&folder, &words("run --input in.safetensors"), "");
    assert!(ran.code == Some(1) && ran.err.contains("in.safetensors"), "{ran:?}");
}

#[cfg(unix)]
#[test]
fn a_fifo_and_a_device_are_refused_wherever_a_file_is_read() {
    let folder = Folder::new();
    assert!(Command::new("mkfifo").arg(folder.path().join("fifo")).status().unwrap().success());
    folder.put("empty/readme", b"");
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("empty/config.json")).unwrap();
    let model = model();
    for path in ["fifo", "/dev/zero", "/dev/full"] {
        for line in [
            format!("run --input {path}"),
            format!("train {path}"),
            format!("translate --model {model} --input {path}"),
            format!("eval --model {model} {path}"),
            format!("eval --hypotheses {path} --references {path}"),
            format!("inspect {path}"),
            format!("convert {path} --out new"),
            format!("show --recording {path}"),
            format!("explore --recording {path}"),
            format!("generate --model {path} a"),
            format!("show --model {path} a"),
        ] {
            let ran = attack(&folder, &words(&line), "");
            assert!(ran.code == Some(1) && ran.err.contains(path), "{line}: {ran:?}");
        }
    }
    for line in ["translate --model empty a", "embed --model empty a", "generate --model empty a", "inspect empty"] {
        let ran = attack(&folder, &words(line), "");
        assert!(ran.code == Some(1) && ran.err.contains("empty"), "{line}: {ran:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_line_without_an_end_is_refused() {
    let line = format!("translate --model {}", model());
    let ran = attack_with(&Folder::new(), "ulimit -v 8000000; exec < /dev/zero", &words(&line), "");
    assert!(ran.code == Some(1) && ran.err.contains("stdin:1: the line is longer than"), "{ran:?}");
}

#[test]
fn one_bad_line_does_not_cost_the_others_and_is_named() {
    let folder = Folder::new();
    let mut lines: Vec<String> = (0..150).map(|at| format!("ab{}", at % 10)).collect();
    lines[100] = "a".repeat(60);
    folder.put("in.txt", (lines.join("\n") + "\n").as_bytes());
    folder.put("keep.txt", b"old\n");
    let line = format!("translate --model {} --greedy --input in.txt --output keep.txt", model());
    let ran = attack(&folder, &words(&line), "");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("in.txt:101: the line has 60 tokens"), "{ran:?}");
    assert!(ran.err.contains("1 of 150 lines failed"), "{ran:?}");
    let written = folder.text("keep.txt");
    let mut written: Vec<&str> = written.lines().collect();
    assert_eq!((written.len(), written.remove(100)), (150, ""));
    lines.remove(100);
    let good = folder.qkv_on(&format!("translate --model {} --greedy", model()), lines.join("\n")).quietly();
    assert_eq!(good.lines().collect::<Vec<_>>(), written, "the other lines are translated as ever");
}

#[test]
fn every_line_wise_command_goes_on_after_a_bad_line() {
    let folder = Folder::new();
    small_encoder(&folder);
    let stdin = b"a cat\n\xff\nprices\n";
    folder.put("in.txt", stdin);
    let ran = folder.qkv("embed --model m --input in.txt");
    assert!(ran.code == Some(1) && ran.err.contains("in.txt:2: byte 1 of the line is not UTF-8"), "{ran:?}");
    let objects = json(&ran.out);
    assert_eq!((objects.len(), objects[1]["embedding"].is_null()), (3, true), "{ran:?}");
    let ran = folder.qkv("embed --model m --input in.txt --output v.safetensors");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let vectors = TensorFile::open(folder.path().join("v.safetensors")).unwrap().read("embeddings").unwrap();
    let width = vectors.len() / 3;
    assert!(vectors[..width].iter().all(|x| x.is_finite()) && vectors[width].is_nan());
    let ran = folder.qkv_on(&format!("translate --model {} --json", model()), stdin);
    let objects = json(&ran.out);
    assert_eq!((ran.code, objects.len(), objects[1]["translation"].is_null()), (Some(1), 3, true), "{ran:?}");
    let ran = folder.qkv_on(&format!("show --model {} --json", model()), b"ab\n\xff\ncd\n");
    assert_eq!((ran.code, json(&ran.out).len()), (Some(1), 2), "{ran:?}");
}

#[test]
fn an_output_is_untouched_when_the_input_is_bad_or_the_process_is_killed() {
    let folder = Folder::new();
    folder.put("keep.txt", b"old\n");
    let typed = format!("translate --model {} --greedy --output keep.txt", model());
    attack(&folder, &words(&format!("{typed} --input none.txt")), "");
    assert_eq!(folder.text("keep.txt"), "old\n");
    let mut child = folder.command(&words(&typed)).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"abc\n").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(folder.text("keep.txt"), "old\n");
    // With `--append` each line is written as soon as it is translated.
    let mut child = folder.command(&words(&format!("{typed} --append"))).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"abc\n").unwrap();
    let start = Instant::now();
    while folder.text("keep.txt").lines().count() < 2 {
        assert!(start.elapsed() < PATIENCE, "nothing is appended");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(folder.text("keep.txt").starts_with("old\n"));
    folder.qkv("translate --append a").misused(&["`--append` requires `--output`"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_as_output_is_written_to_and_never_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let folder = Folder::new();
    small_encoder(&folder);
    folder.qkv("embed --model m --output /dev/null a").quietly();
    folder.typed(&words(&format!("translate --model {} --output /dev/null a", model())), "").quietly();
    assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    folder.qkv("embed --model m --output /dev/full a").fails(&["`/dev/full`: cannot be written"]);
}

#[test]
fn a_model_of_nan_is_refused_by_every_command() {
    let folder = Folder::new();
    for name in ["config.json", "tokenizer.json", "generation_config.json"] {
        folder.put(&format!("nan/{name}"), &std::fs::read(Path::new(model()).join(name)).unwrap());
    }
    poison(&Path::new(model()).join("model.safetensors"), &folder.path().join("nan/model.safetensors"));
    small_encoder(&folder);
    poison(&folder.path().join("m/model.safetensors"), &folder.path().join("m/model.safetensors"));
    for line in ["translate --model nan abc", "translate --model nan --sample abc", "embed --model m a"] {
        let ran = attack(&folder, &words(line), "");
        assert!(ran.code == Some(1) && ran.err.contains("NaN"), "{line}: {ran:?}");
    }
    let ran = attack(&folder, &words("translate --model nan"), "abc\nab\n");
    assert!(ran.code == Some(1) && ran.err.matches("error:").count() == 1, "reported once: {ran:?}");
}

/// A copy of a weights file in which every number is NaN.
fn poison(from: &Path, to: &Path) {
    let file = TensorFile::open(from).unwrap();
    let tensors: Vec<(String, Vec<usize>)> =
        file.names().map(|name| (name.to_owned(), file.shape(name).unwrap().to_vec())).collect();
    let values: Vec<Vec<f32>> =
        tensors.iter().map(|(_, shape)| vec![f32::NAN; shape.iter().product::<usize>().max(1)]).collect();
    let named: Vec<NamedTensor<'_>> =
        (tensors.iter().zip(&values)).map(|((name, shape), values)| NamedTensor { name, shape, values }).collect();
    write(to, &named, Storage::F32).unwrap();
}

/// A small encoder in the folder `m`.
fn small_encoder(folder: &Folder) {
    let tokenizer = Tokenizer::train(["a cat sleeps; prices rose"], Kind::Characters).unwrap();
    let config = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 1, ..EncoderConfig::default() };
    Encoder::new(&config, tokenizer, 5).unwrap().save(folder.path().join("m"), Storage::F32).unwrap();
}

#[test]
fn an_unknown_instruction_set_is_an_error_in_every_command() {
    let folder = Folder::new();
    for line in ["run", "translate a", "bench --shape 1,1,1,8,8,4", "inspect none", "doctor"] {
        let ran = folder.command(&words(line)).env("QKV_ISA", "foo").output().unwrap();
        let err = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(1), "{line}: {err}");
        assert!(err.contains("`QKV_ISA=foo` names no instruction set") && err.contains("portable"), "{line}: {err}");
    }
    let ran = folder.command(&["run"]).env("QKV_ISA", "portable").output().unwrap();
    assert_eq!(ran.status.code(), Some(0));
}

#[test]
fn numbers_beyond_the_range_are_answered_with_the_range() {
    let folder = Folder::with_recipe();
    let huge = "340282366920938463463374607431768211456";
    folder.qkv(&format!("run --dropout 0.1 --seed {huge}")).misused(&["0 to 18446744073709551615"]);
    folder.qkv(&format!("bench --rounds {huge} --against torch")).misused(&["5 to 1000"]);
    for number in ["18446744073709551615", huge] {
        let ran = folder.qkv(&format!("train tiny.toml --set train.steps={number}"));
        assert!(!ran.err.contains("cut off"), "{ran:?}");
        ran.fails(&["`--set train.steps=", "9223372036854775807"]);
    }
}

#[cfg(unix)]
#[test]
fn a_conversion_that_fails_leaves_nothing_in_its_way() {
    let folder = Folder::new();
    small_encoder(&folder);
    // Limits files to 512 bytes, which acts like a full disk in the middle of a write.
    let full = "trap '' XFSZ; ulimit -f 1";
    let ran = attack_with(&folder, full, &words("convert m --out new"), "");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let names: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("new"))
        .collect();
    assert!(names.is_empty(), "{names:?}");
    folder.qkv("convert m --out new").quietly();
    assert!(folder.has("new/config.json"));
}
