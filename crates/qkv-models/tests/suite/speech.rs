//! A voice learns from synthesized sounds, is read back from its folder, says a given text, and attends to each letter
//! while it sounds.

use qkv_models::audio::{Vocoder, wav};
use qkv_models::draws::Draws;
use qkv_models::train::Run;
use qkv_models::{Inspection, Recipe, SpeakOptions, Speaker, diagonal_share, kind, tasks};
use qkv_nn::Machine;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What is looked at are spectrograms and alignments, so the sound itself need not be good.
const SKETCHED: SpeakOptions = SpeakOptions { iterations: 2, seed: 1 };

fn recipe(data: &str, steps: usize) -> Recipe {
    let text = format!(
        "name = 'small'
         [data]
         {data}
         [tokenizer]
         kind = 'characters'
         [model]
         kind = 'voice'
         d_model = 64
         dropout = 0.0
         ffn_dim = 64
         heads = 2
         encoder_layers = 1
         decoder_layers = 1
         prenet = 32
         postnet_layers = 2
         postnet = 32
         max_steps = 60
         [train]
         steps = {steps}
         tokens = 300
         longest = 400
         lr = 3e-3
         warmup = 20
         average = 0.0
         metric = 'loss'
         validate = 10000
         save = 10000"
    );
    Recipe::parse(&text, Path::new("small.toml"), &[]).unwrap()
}

fn train(recipe: &Recipe, folder: &Path) {
    Run::new(recipe, folder, 1).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap();
}

/// The letter whose tone is nearest to a frame.
fn loudest(frame: &[f32], tones: &[Vec<f32>]) -> usize {
    let far = |tone: &[f32]| frame.iter().zip(tone).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
    (0..tones.len()).min_by(|&a, &b| far(&tones[a]).total_cmp(&far(&tones[b]))).unwrap()
}

#[test]
fn a_voice_sings_the_letters_of_texts_it_never_heard_with_a_diagonal_alignment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    train(&recipe("tones = 64\ndev_tones = 4", 300), &path);
    assert_eq!(kind(&path).unwrap(), "voice");
    let (voice, machine) = (Speaker::open(&path).unwrap(), Machine::new(2));
    // The middle of each letter's tone.
    let vocoder = Vocoder::new(80);
    let tone = |letter: char| {
        let sung = tasks::sing(&letter.to_string().repeat(3), &mut Draws::new(1, [0; 3]));
        let peak = 0.08 / (sung.iter().map(|x| x * x).sum::<f32>() / sung.len() as f32).sqrt();
        let frames = vocoder.spectrogram(&sung.iter().map(|x| x * peak).collect::<Vec<f32>>());
        frames[80 * (sung.len() / 400)..][..80].to_vec()
    };
    let tones: Vec<Vec<f32>> = tasks::LETTERS.chars().map(tone).collect();
    let (mut right, mut all) = (0, 0);
    for text in ["abcdefgh", "hgfedcba", "acegbdfh"] {
        let speech = voice.speak(text, &SKETCHED, &machine).unwrap();
        assert_eq!((speech.letters.len(), speech.ended), (9, true), "{text}");
        let share = diagonal_share(&speech.alignment);
        assert!(share >= 0.8, "{share} of the weight of {text} is near the diagonal");
        let seconds = speech.samples.len() as f64 / 16_000.0;
        assert!((0.7..1.3).contains(&seconds), "{seconds} s of {text}");
        let frames: Vec<&[f32]> = speech.frames.chunks_exact(80).collect();
        for (at, letter) in text.chars().enumerate() {
            let middle = frames.len() * (2 * at + 1) / (2 * 8);
            right += usize::from(Some(loudest(frames[middle], &tones)) == tasks::LETTERS.find(letter));
            all += 1;
        }
        let again = voice.speak(text, &SKETCHED, &machine).unwrap();
        assert_eq!(again.samples, speech.samples, "the seed decides");
    }
    assert!(right * 10 >= all * 8, "{right} of {all} letters sound as they should");
    let inspected = Inspection::of(&path).unwrap();
    assert!(inspected.misfits.is_empty() && inspected.model.unwrap().starts_with("voice: 12 letters to 80 mel bands"));
    for (text, said) in [("", "nothing to say"), ("abz", "has not learned the letter `z`")] {
        let error = voice.speak(text, &SKETCHED, &machine).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    assert_eq!(voice.phrases("Abc.  Bad\nface").unwrap(), ["abc.", "bad", "face"]);
    let long = voice.phrases(&"abc ".repeat(200)).unwrap();
    assert!(long.len() > 2 && long.iter().all(|phrase| phrase.len() <= 256));
}

#[test]
fn a_voice_learns_from_lists_of_recordings_and_goes_on_from_another() {
    let folder = tempfile::tempdir().unwrap();
    let (train_texts, dev_texts) = tasks::tones(3, 6, 2);
    for (name, texts) in [("train", &train_texts), ("dev", &dev_texts)] {
        let mut list = String::new();
        for (at, sung) in texts.iter().enumerate() {
            std::fs::write(folder.path().join(format!("{name}{at}.wav")), wav::to_bytes(&sung.samples, 16_000))
                .unwrap();
            list += &format!("{name}{at}.wav\t{}\n", sung.text);
        }
        std::fs::write(folder.path().join(format!("{name}.tsv")), list).unwrap();
    }
    let data = format!("spoken = '{0}/train.tsv'\ndev = '{0}/dev.tsv'", folder.path().display());
    let first = folder.path().join("first");
    train(&recipe(&data, 3), &first);
    let text = recipe(&data, 2).to_toml();
    let text = text.split("[model]").next().unwrap().to_owned()
        + &format!("[model]\nfrom = '{}'\n[train]\nsteps = 2\nmetric = 'loss'\nlongest = 400\n", first.display());
    let again = Recipe::parse(&text, Path::new("again.toml"), &[]).unwrap();
    let run = Run::new(&again, folder.path().join("second"), 1).unwrap();
    assert_eq!(run.kind(), "voice");
    assert!(run.provenance().is_some());
}

/// Writes recordings of texts with the times of their letters: `a` sounds for 0.1 s, `b` for 0.3 s.
fn timed_tones(folder: &Path, name: &str, count: usize) -> String {
    let mut list = String::new();
    for at in 0..count {
        let text: String = (0..5).map(|letter| if (at >> letter) & 1 == 0 { 'a' } else { 'b' }).collect();
        let (mut samples, mut times) = (Vec::new(), Vec::new());
        for letter in text.chars() {
            times.push(format!("{:.3}", samples.len() as f64 / 16_000.0));
            let (seconds, pitch) = if letter == 'a' { (0.1, 0.2) } else { (0.3, 0.6) };
            samples.extend((0..(seconds * 16_000.0) as usize).map(|at| 0.3 * (at as f32 * pitch).sin()));
        }
        std::fs::write(folder.join(format!("{name}{at}.wav")), wav::to_bytes(&samples, 16_000)).unwrap();
        list += &format!("{name}{at}.wav\t{text}\t{}\n", times.join(" "));
    }
    std::fs::write(folder.join(format!("{name}.tsv")), list).unwrap();
    format!("{}/{name}.tsv", folder.display())
}

#[test]
fn a_voice_learns_how_long_letters_sound_and_attends_to_them_then() {
    let folder = tempfile::tempdir().unwrap();
    let (spoken, dev) = (timed_tones(folder.path(), "train", 32), timed_tones(folder.path(), "dev", 4));
    let recipe = recipe(&format!("spoken = '{spoken}'\ndev = '{dev}'"), 110);
    for hears in [false, true] {
        let sets = ["model.durations=true".to_owned(), format!("model.hears={hears}"), "model.guide=1".to_owned()];
        let recipe = Recipe::parse(&recipe.to_toml(), Path::new("timed.toml"), &sets).unwrap();
        let path = folder.path().join(format!("hears-{hears}"));
        train(&recipe, &path);
        let (voice, machine) = (Speaker::open(&path).unwrap(), Machine::new(2));
        for text in ["aabaa", "babbb"] {
            let speech = voice.speak(text, &SKETCHED, &machine).unwrap();
            let longest = text.chars().map(|letter| if letter == 'a' { 0.1 } else { 0.3 });
            let (expected, found) = (longest.clone().sum::<f64>(), speech.samples.len() as f64 / 16_000.0);
            assert!(speech.ended && (found - expected).abs() < 0.15, "{found} s of {text}, not {expected}");
            // The letter with the most attention is the one that sounds.
            let ends: Vec<f64> = longest
                .scan(0.0, |end, one| {
                    *end += one;
                    Some(*end)
                })
                .collect();
            let right = |(step, row): (usize, &Vec<f32>)| {
                let time = (step as f64 + 0.5) * speech.step;
                let sounds = ends.partition_point(|&end| end < time).min(text.len() - 1);
                let most = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
                usize::from(most.abs_diff(sounds) <= 1)
            };
            let right: usize = speech.alignment.iter().enumerate().map(right).sum();
            assert!(right * 10 >= speech.alignment.len() * 8, "{right} of {} steps of {text}", speech.alignment.len());
            let along = voice.speak_along(text, &speech.samples, &SKETCHED, &machine).unwrap();
            assert_eq!(along.letters, speech.letters);
        }
    }
}

#[test]
fn settings_and_data_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = |recipe: &Recipe| Run::new(recipe, folder.path().join("run"), 1).unwrap_err().to_string();
    let tones = recipe("tones = 4\ndev_tones = 2", 1);
    let with = |change: &str| Recipe::parse(&tones.to_toml(), Path::new("a.toml"), &[change.to_owned()]);
    for (change, expected) in [
        ("model.prenet_dropout=1.0", "`prenet_dropout` is 1"),
        ("model.reduction=0", "`reduction` is 0"),
        ("model.guide_width=0", "`guide_width` is 0"),
        ("model.max_steps=2", "too long for the voice"),
        ("model.heads=7", "heads"),
        ("model.hears=false", "without `durations`"),
        ("model.durations=true", "which the data has not"),
    ] {
        let error = said(&with(change).unwrap());
        assert!(error.contains(expected), "{change}: {error}");
    }
    assert!(with("train.metric=bleu").unwrap_err().to_string().contains("which such data has not"));
    assert!(said(&recipe("task = 'copy'\npairs = 4\ndev_pairs = 2", 1)).contains("a `voice` learns from recordings"));
}
