//! Fine-tuning: `[model] from`, on models that are trained here in a second.

use crate::models::program::{Folder, json};

/// A recipe over `[data] DATA` with this `[model]` table.
fn recipe(data: &str, model: &str, steps: usize, metric: &str) -> String {
    format!(
        "name = 'tiny'\n[data]\n{data}\n[tokenizer]\nkind = 'bpe'\nsize = 320\n[model]\n{model}\n[train]\nsteps = {steps}\ntokens = 256\n\
         longest = 24\nlr = 5e-3\nwarmup = 5\nschedule = 'linear'\nsmoothing = 0.0\naverage = 0.0\nmetric = '{metric}'\n\
         validate = {steps}\nsave = 20\n"
    )
}

const ENCODER: &str = "kind = 'encoder'\nd_model = 32\nffn_dim = 64\nheads = 2\nlayers = 2\nmax_positions = 40\n\
                       dropout = 0.0\nattention_dropout = 0.0";

/// Texts of two classes, and sentences of the same words with tags.
fn data(folder: &Folder) {
    let films: String = (0..40)
        .map(|at| {
            let (label, word) = [("good", "lovely"), ("bad", "dreadful")][at % 2];
            format!("{label}\tthe film number {at} was {word} to see\n")
        })
        .collect();
    let sentences: String = (0..40)
        .map(|at| {
            let name = ["Ada", "Alan"][at % 2];
            format!("{name}\tB-person\nsaw\tO\nthe\tO\nlovely\tO\nfilm\tB-work\nnumber\tI-work\n\n")
        })
        .collect();
    folder.put("films", films.as_bytes());
    folder.put("sentences", sentences.as_bytes());
}

/// A folder with a model `base` that classifies.
fn based() -> Folder {
    let folder = Folder::new();
    data(&folder);
    folder.put("base.toml", recipe("classes = 'films'\ndev = 'films'", ENCODER, 60, "exact").as_bytes());
    folder.qkv("train base.toml --out base --quiet --threads 2").well();
    folder
}

#[test]
fn an_encoder_gets_a_new_head_and_says_what_it_used() {
    let folder = based();
    let tags = recipe("tags = 'sentences'\ndev = 'sentences'", "from = 'base'\ndropout = 0.1", 60, "f1");
    folder.put("ner.toml", tags.as_bytes());
    let said = folder.qkv("train ner.toml --dry-run").quietly();
    for expected in [
        "data     40 texts with 4 labels",
        "model    encoder",
        "from     37 tensors used",
        "2 added: classifier.weight, classifier.bias",
        "4 left out: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.weight",
    ] {
        assert!(said.contains(expected), "no {expected:?} in: {said}");
    }
    let plan = &json(&folder.qkv("train ner.toml --dry-run --json").quietly())[0];
    assert_eq!((plan["from"]["used"].as_array().unwrap().len(), plan["model"].as_str()), (37, Some("encoder")));
    assert!(!folder.path().join("runs").exists(), "nothing is written");
    let log = folder.qkv("train ner.toml --out ner --log-format plain --threads 2");
    assert!(log.err.contains("from     37 tensors used") && log.err.contains("entity F1 100.00"), "{}", log.err);
    log.well();
    let report = folder.qkv("eval --model ner sentences").quietly();
    assert!(
        report.contains("person     100.00  100.00  100.00       40") && report.contains("entity F1 = 100.00"),
        "{report}"
    );
    let scores = &json(&folder.qkv("eval --model ner sentences --json").quietly())[0];
    assert_eq!((scores["f1"].as_f64(), scores["classes"][1]["name"].as_str()), (Some(100.0), Some("work")));
    let accuracy = folder.qkv("eval --model base films").quietly();
    assert!(accuracy.contains("accuracy = 100.00 % (40 texts), mean F1 = 100.00"), "{accuracy}");
}

#[test]
fn the_same_labels_keep_the_head_and_a_stopped_run_ends_the_same() {
    let folder = based();
    let again = recipe("classes = 'films'\ndev = 'films'", "from = 'base'", 30, "exact");
    folder.put("again.toml", again.as_bytes());
    assert!(folder.qkv("train again.toml --dry-run").quietly().contains("0 added\n"));
    // The first step has the loss of a model that already knows its task.
    let start = folder.qkv("train again.toml --out whole --log-format json --set train.log=1 --threads 1");
    let first: f64 = json(&start.err).iter().find(|line| line["event"] == "step").unwrap()["loss"].as_f64().unwrap();
    assert!(first < 0.1, "{first}");
    start.well();
    folder
        .qkv("train again.toml --out parts --quiet --threads 1 --set train.steps=20 --set train.schedule=constant")
        .well();
    folder.qkv("train again.toml --out whole2 --quiet --threads 1 --set train.schedule=constant").well();
    folder.qkv("train --resume parts --quiet --threads 2 --set train.steps=30").well();
    let weights = "checkpoints/00000030/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{weights}")) == folder.bytes(&format!("whole2/{weights}")), "{weights}");
}

#[test]
fn every_kind_of_ours_continues_and_what_does_not_fit_is_refused() {
    let folder = based();
    // A translator and a language model of ours.
    folder.put("copy.toml", crate::models::program::RECIPE.as_bytes());
    folder.qkv("train copy.toml --out copy --quiet --threads 2").well();
    let from = crate::models::program::RECIPE.split("[model]").next().unwrap().to_owned()
        + "[model]\nfrom = 'copy'\n[train]\nsteps = 2\ntokens = 400\nvalidate = 2\nmetric = 'loss'\n";
    folder.put("more.toml", from.as_bytes());
    let said = folder.qkv("train more.toml --out more --log-format plain --threads 2");
    assert!(said.err.contains("0 added") && said.err.contains("0 left out"), "{}", said.err);
    said.well();
    let text: String = (0..200).map(|at| format!("the film number {at} was lovely to see\n")).collect();
    folder.put("text.txt", text.as_bytes());
    let gpt = "kind = 'gpt'\nd_model = 32\nffn_dim = 64\nheads = 2\nlayers = 1\nmax_positions = 40";
    folder.put("gpt.toml", recipe("text = 'text.txt'\ndev = 'text.txt'", gpt, 40, "loss").as_bytes());
    folder.qkv("train gpt.toml --out gpt --quiet --threads 2").well();
    folder.put("gpt2.toml", recipe("text = 'text.txt'\ndev = 'text.txt'", "from = 'gpt'", 20, "loss").as_bytes());
    folder.qkv("train gpt2.toml --out gpt2 --quiet --threads 2").well();
    let perplexity = |model: &str| {
        let scores = folder.qkv(&format!("eval --model {model} text.txt --json")).quietly();
        json(&scores)[0]["perplexity"].as_f64().unwrap()
    };
    assert!(perplexity("gpt2") < perplexity("gpt"));
    // A document classifier, from one with other classes.
    let han = "kind = 'han'\nd_model = 16\nhidden = 8\nattention_width = 8";
    folder.put("han.toml", recipe("classes = 'films'\ndev = 'films'", han, 10, "exact").as_bytes());
    folder.qkv("train han.toml --out han --quiet --threads 2").well();
    folder.put("three", b"a\tthe film\nb\twas lovely\nc\tto see\n");
    folder.put("han3.toml", recipe("classes = 'three'\ndev = 'three'", "from = 'han'", 10, "exact").as_bytes());
    let said = folder.qkv("train han3.toml --dry-run").quietly();
    assert!(said.contains("2 added: head.weight, head.bias"), "{said}");

    folder.put("bad.toml", recipe("text = 'text.txt'\ndev = 'text.txt'", "from = 'base'", 1, "loss").as_bytes());
    folder.qkv("train bad.toml --out x").fails(&["an encoder makes no text"]);
    folder.put("bad.toml", recipe("text = 'text.txt'\ndev = 'text.txt'", "from = 'none'", 1, "loss").as_bytes());
    folder.qkv("train bad.toml --out x").fails(&["`model.from` is `none`, which does not exist", "hint: "]);
    folder.put("bad.toml", recipe("tags = 'sentences'\ndev = 'sentences'", "from = 'gpt'", 1, "f1").as_bytes());
    folder.qkv("train bad.toml --out x").fails(&["a gpt cannot learn to read labels"]);
}

#[test]
fn an_encoder_learns_answers_and_a_vit_other_classes() {
    let folder = based();
    let questions: Vec<String> = (0..24)
        .map(|at| {
            let place = ["Oslo", "Rome", "Bern", "Kyiv"][at % 4];
            let context = format!("In year {at} Ada flew to {place} in the rain");
            let start = context.find(place).unwrap();
            format!(
                r#"{{"context":"{context}","qas":[{{"id":"{at}","question":"Where did Ada fly?","answers":[{{"text":"{place}","answer_start":{start}}}]}}]}}"#
            )
        })
        .collect();
    let file = format!(r#"{{"version":"1.1","data":[{{"title":"t","paragraphs":[{}]}}]}}"#, questions.join(","));
    folder.put("questions", file.as_bytes());
    let answers = recipe("answers = 'questions'\ndev = 'questions'", "from = 'base'", 150, "f1");
    folder.put("answers.toml", answers.replace("longest = 24", "longest = 40").as_bytes());
    let said = folder.qkv("train answers.toml --dry-run").quietly();
    assert!(said.contains("37 tensors used") && said.contains("2 added: qa_outputs.weight, qa_outputs.bias"), "{said}");
    let log = folder.qkv("train answers.toml --out answers --log-format plain --threads 2");
    assert!(log.err.contains("exact match 100.00 %"), "{}", log.err);
    log.well();
    let scores = &json(&folder.qkv("eval --model answers questions --json").quietly())[0];
    assert_eq!(scores["f1"].as_f64(), Some(100.0), "{scores}");

    // A vision Transformer with the classes of another task.
    let (images, _) = crate::models::images::trained();
    let three = crate::models::images::RECIPE
        .replace("names = ['left', 'right']", "names = ['left', 'right', 'none']")
        .replace("steps = 60", "steps = 40");
    let (start, end) = (three.find("[model]").unwrap(), three.find("[train]").unwrap());
    let three = format!("{}[model]\nfrom = 'm'\n{}", &three[..start], &three[end..]);
    images.put("three.toml", three.as_bytes());
    let said = images.qkv("train three.toml --dry-run").quietly();
    assert!(said.contains("2 added: classifier.weight, classifier.bias"), "{said}");
    let log = images.qkv("train three.toml --out three --log-format plain --threads 2");
    assert!(log.err.contains("accuracy 100.00 %"), "{}", log.err);
    log.well();
    let told = json(&images.qkv("classify --model three --image left.png --json").quietly());
    assert_eq!(told[0]["probabilities"].as_object().map(|all| all.len()), Some(3), "{told:?}");
}
