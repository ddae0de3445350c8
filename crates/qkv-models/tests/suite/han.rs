//! Hierarchical attention: padding of a batch changes nothing, and a model is read back from its folder unchanged.

use qkv_models::files::tensors::Storage;
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{Classifier, Han, HanConfig, Inspection};
use qkv_nn::Machine;

const TEXTS: [&str; 5] = [
    "the plot is thin . <s> still , the film is a joy from its first minute to its last <s> go",
    "dull",
    "a b c d e f g h i j k l m n o p q r s t <s> a b <s> a b c <s> a <s> b <s> c d e f <s> the end",
    "",
    "a word that nobody knows : zyzzyva",
];

fn han(attention: qkv::Attention) -> Han {
    let tokenizer = Tokenizer::train(TEXTS.iter().chain(&TEXTS), Kind::Words { size: 100 }).unwrap();
    let labels = ["bad", "fair", "good"].map(String::from).to_vec();
    let config = HanConfig {
        d_model: 12,
        hidden: 6,
        attention_width: 5,
        words: 8,
        sentences: 9,
        attention,
        labels,
        ..HanConfig::default()
    };
    Han::new(&config, tokenizer, 7).unwrap()
}

fn near(one: &[f32], other: &[f32]) {
    assert!(one.len() == other.len() && one.iter().zip(other).all(|(a, b)| (a - b).abs() < 2e-6), "{one:?} {other:?}");
}

#[test]
fn a_document_is_read_the_same_whatever_stands_beside_it() {
    for attention in [qkv::Attention::additive(), qkv::Attention::scaled_dot().sparsemax()] {
        let (han, machine) = (han(attention), Machine::new(2));
        let together = han.classify(&TEXTS, &machine).unwrap();
        for (text, row) in TEXTS.iter().zip(&together) {
            near(&han.classify(&[text], &machine).unwrap()[0], row);
            near(&han.read(text, &machine).unwrap().probabilities, row);
        }
        assert!(together[0].iter().zip(&together[2]).any(|(a, b)| (a - b).abs() > 1e-4), "documents differ");
    }
}

#[test]
fn what_fills_up_has_no_effect_whatever_it_holds() {
    let (mut han, machine) = (han(qkv::Attention::additive()), Machine::new(2));
    let before = han.classify(&TEXTS, &machine).unwrap();
    let (table, pad) = (han.parameters.find("tokens.weight").unwrap(), han.tokenizer.pad() as usize);
    han.parameters.get_mut(table)[pad * 12..][..12].fill(f32::NAN);
    assert_eq!(han.classify(&TEXTS, &machine).unwrap(), before);
}

#[test]
fn both_levels_come_out_with_the_answer_and_sum_to_one() {
    let (han, machine) = (han(qkv::Attention::additive()), Machine::new(1));
    let text = TEXTS[2];
    let read = han.read(text, &machine).unwrap();
    // Twenty words are three sentences for a model with at most eight words per sentence; the document's last one is
    // left out.
    assert_eq!((read.sentences.len(), read.left_out), (9, 0));
    assert!((read.sentences.iter().map(|sentence| sentence.weight).sum::<f32>() - 1.0).abs() < 1e-5);
    for sentence in &read.sentences {
        assert!((sentence.words.iter().map(|word| word.weight).sum::<f32>() - 1.0).abs() < 1e-5);
        let words: Vec<&str> = sentence.words.iter().map(|word| word.text.as_str()).collect();
        assert_eq!(words.join(" "), sentence.text);
    }
    let unknown = han.read(TEXTS[4], &machine).unwrap();
    assert_eq!(unknown.sentences[0].words.last().unwrap().text, "zyzzyva");
    let empty = han.read("", &machine).unwrap();
    assert_eq!((empty.sentences.len(), empty.probabilities.len()), (0, 3));
    assert_eq!(han.read("dull", &machine).unwrap().sentences[0].weight, 1.0);
    let long = "a <s> ".repeat(30);
    assert_eq!(han.read(&long, &machine).unwrap().left_out, 21);
}

#[test]
fn a_folder_gives_the_model_back_and_one_that_lies_is_refused() {
    let (han, machine) = (han(qkv::Attention::additive()), Machine::new(1));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m");
    han.save(&path, Storage::F32).unwrap();
    let again = Classifier::open(&path).unwrap();
    assert_eq!(again.texts(&TEXTS, &machine).unwrap(), han.classify(&TEXTS, &machine).unwrap());
    assert_eq!(again.labels(), ["bad", "fair", "good"]);
    let found = Inspection::of(&path).unwrap();
    assert!(found.misfits.is_empty() && found.model.unwrap().starts_with("han: width 12, states of 6"));
    let image = qkv_models::image::Image::new(1, 1, 1, vec![0]).unwrap();
    assert!(again.images(&[image], &machine).unwrap_err().to_string().contains("sees no images"));

    let config = std::fs::read_to_string(path.join("config.json")).unwrap();
    for (from, to, what) in [
        ("\"hidden\": 6", "\"hidden\": 7", "its shape is"),
        ("\"d_model\": 12", "\"d_model\": 60000", "the configuration needs at least"),
        ("\"hidden\": 6", "\"hidden\": 0", "`hidden` is 0"),
        ("\"words\": 8", "\"words\": \"many\"", "config.json"),
        ("\"kind\": \"han\"", "\"kind\": \"gru\"", "config.json"),
    ] {
        assert!(config.contains(from), "{from}: {config}");
        std::fs::write(path.join("config.json"), config.replace(from, to)).unwrap();
        let said = Han::open(&path).unwrap_err().to_string();
        assert!(said.contains(what), "{to}: {said}");
    }
}
