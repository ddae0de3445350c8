//! Models that look at images learn from generated pictures, are read back from their folders, and report where they
//! looked.

use qkv_models::image::Image;
use qkv_models::metrics::detection::{AveragePrecision, ScoredBox};
use qkv_models::train::Run;
use qkv_models::{Describer, Detector, Inspection, Recipe, Search, Vqa, kind, tasks};
use qkv_nn::Machine;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Writes a gray PNG.
fn write_grey(path: &Path, width: usize, height: usize, points: Vec<u8>) {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(&points).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// A run on a few small pictures, which are learned by heart.
fn recipe(task: &str, model: &str, steps: usize) -> Recipe {
    let text = format!(
        "name = 'small'
         [data]
         shapes = '{task}'
         scenes = 6
         dev_scenes = 2
         [tokenizer]
         kind = 'bpe'
         size = 400
         [model]
         {model}
         d_model = 32
         ffn_dim = 32
         heads = 2
         dropout = 0.0
         image = {{ height = 32, width = 32, patch_size = 8, stem_channels = 16, layers = 1 }}
         [train]
         steps = {steps}
         tokens = 100000
         lr = 3e-3
         warmup = 10
         smoothing = 0.0
         average = 0.0
         metric = 'loss'
         validate = 10000
         save = 10000"
    );
    Recipe::parse(&text, Path::new("small.toml"), &[]).unwrap()
}

/// Trains a recipe and returns the pictures it learned from.
fn trained(recipe: &Recipe, folder: &Path) -> Vec<tasks::Scene> {
    let mut run = Run::new(recipe, folder, 1).unwrap();
    run.train(&mut (), &AtomicBool::new(false)).unwrap();
    // Pictures have their own seed, by the constant in `picture_data`.
    tasks::scenes(recipe.seed ^ 0x7363_656e, 6, 2).0
}

/// The eyes of a model are not trained and not part of its weights; other eyes in the model's folder see something
/// else.
#[test]
fn a_model_sees_with_eyes_that_are_trained_already() {
    let folder = tempfile::tempdir().unwrap();
    let eyes = folder.path().join("resnet");
    std::fs::create_dir(&eyes).unwrap();
    let mut seeing = super::resnet::seeing(2048);
    super::resnet::write(&eyes, &seeing);
    for (task, model) in
        [("captions", "kind = 'describe'\ndecoder = 'gru'\ndecoder_layers = 1"), ("questions", "kind = 'vqa'")]
    {
        let image = format!("model.image={{height=64,width=64,patch_size=32,layers=0,eyes='{}'}}", eyes.display());
        let recipe = Recipe::parse(&recipe(task, model, 3).to_toml(), Path::new("small.toml"), &[image]).unwrap();
        let path = folder.path().join(task);
        let scenes = trained(&recipe, &path);
        let (machine, image) = (Machine::new(2), &scenes[0].image);
        let seen = || match task {
            "captions" => {
                let describer = Describer::open(&path).unwrap();
                assert!(describer.parameters.find("conv1.weight").is_none());
                let once = describer.describe(std::slice::from_ref(image), &Search::greedy(), &machine).unwrap();
                let again = describer.describe(std::slice::from_ref(image), &Search::greedy(), &machine).unwrap();
                assert_eq!(once, again);
                assert_eq!(describer.look_at(image, &once[0][0].tokens[..1], &machine).unwrap().grid, [2, 2]);
                once[0][0].log_probability
            }
            _ => f64::from(Vqa::open(&path).unwrap().answer(image, "is it red", &machine).unwrap().probabilities[0]),
        };
        let first = seen();
        std::fs::create_dir(path.join("eyes")).unwrap();
        seeing.get_mut("bn5a_branch2c/beta").unwrap().1.iter_mut().step_by(3).for_each(|x| *x += 3.0);
        super::resnet::write(&path.join("eyes"), &seeing);
        assert_ne!(seen(), first);
    }
    let wrong =
        recipe("captions", "kind = 'describe'", 1).to_toml().replace("patch_size = 8", "patch_size = 8\neyes = 'x'");
    let wrong = Recipe::parse(&wrong, Path::new("small.toml"), &[]).unwrap();
    let said = Run::new(&wrong, folder.path().join("wrong"), 1).err().unwrap().to_string();
    assert!(said.contains("places of 8 pixels in 3 channels have eyes"), "{said}");
}

#[test]
fn a_describer_learns_pictures_by_heart_and_says_where_it_looked() {
    for model in ["kind = 'describe'\ndecoder_layers = 1", "kind = 'describe'\ndecoder = 'gru'\ndecoder_layers = 1"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let scenes = trained(&recipe("captions", model, 300), &path);
        assert_eq!(kind(&path).unwrap(), "describe");
        let (describer, machine) = (Describer::open(&path).unwrap(), Machine::new(2));
        let images: Vec<Image> = scenes.iter().map(|scene| scene.image.clone()).collect();
        let found = describer.describe(&images, &Search::greedy(), &machine).unwrap();
        for (scene, found) in scenes.iter().zip(&found) {
            assert_eq!(found[0].text, scene.caption(), "{model}");
        }
        let looked = describer.look_at(&images[0], &found[0][0].tokens, &machine).unwrap();
        assert_eq!((looked.grid, looked.weights.len()), ([4, 4], found[0][0].tokens.len() + 1));
        for row in &looked.weights {
            assert!(row.len() == 16 && (row.iter().sum::<f32>() - 1.0).abs() < 1e-4, "{row:?}");
        }
        let inspected = Inspection::of(&path).unwrap();
        assert!(inspected.misfits.is_empty() && inspected.model.unwrap().starts_with("describe: images of 32 × 32"));
    }
}

/// Sampled hard attention is trained by rewards, and a run that stops resumes with the same bytes.
#[test]
fn hard_attention_learns_and_goes_on_where_it_stopped() {
    let model = "kind = 'describe'\ndecoder = 'gru'\ndecoder_layers = 1\n\
        attention = { score = 'additive', select = { hard = { sample = true, straight_through = false } } }";
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let losses = |path: &Path| {
        let text = std::fs::read_to_string(path.join("metrics.jsonl")).unwrap();
        let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
        text.lines().filter_map(loss).collect::<Vec<f64>>()
    };
    let whole = recipe("captions", model, 60).to_toml().replace("save = 10000", "save = 30");
    let changes = |steps: usize| vec!["train.log=10".to_owned(), format!("train.steps={steps}")];
    let whole = |steps: usize| Recipe::parse(&whole, Path::new("small.toml"), &changes(steps)).unwrap();
    trained(&whole(60), &at("whole"));
    let losses = losses(&at("whole"));
    assert!(losses[losses.len() - 1] < 0.7 * losses[0], "{losses:?}");
    trained(&whole(30), &at("parts"));
    let how = qkv_models::train::Resume { changes: vec!["train.steps=60".into()], checkpoint: None };
    let mut run = Run::resume_with(at("parts"), &how, 2).unwrap();
    run.train(&mut (), &AtomicBool::new(false)).unwrap();
    drop(run);
    let weights = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
    assert!(weights("whole") == weights("parts"));
}

/// A model with a ResNet stem and images of different sizes can be trained; it never writes the unknown token, even if
/// its training texts contain it.
#[test]
fn formulas_of_several_sizes_are_learned_with_a_resnet() {
    let folder = tempfile::tempdir().unwrap();
    let mut lines = String::new();
    let line = |width: usize, name: &str| {
        let points = (0..width * 20).map(|at| if (at % width).is_multiple_of(5) { 0 } else { 255 }).collect();
        write_grey(&folder.path().join(name), width, 20, points);
    };
    for (name, width, text) in [("a.png", 20, "short"), ("b.png", 50, "a longer one"), ("c.png", 60, "the longest")] {
        line(width, name);
        lines += &format!("{name}\t{text}\n");
    }
    for name in ["train.tsv", "dev.tsv"] {
        std::fs::write(folder.path().join(name), &lines).unwrap();
    }
    let text = format!(
        "name = 'small'\n[data]\ncaptions = '{0}/train.tsv'\ndev = '{0}/dev.tsv'\n\
         [tokenizer]\nkind = 'words'\nsize = 5\n\
         [model]\nkind = 'describe'\nd_model = 32\nffn_dim = 32\nheads = 2\ndecoder_layers = 1\ndropout = 0.0\n\
         activation = 'geglu'\nhead_width = 8\nattention_bias = false\ngated_attention = true\n\
         image = {{ height = 32, width = 64, channels = 1, patch_size = 4, layers = 1, fit = 'trim', stem = 'resnet', \
         stem_channels = 32, stem_blocks = [1], class_token = true, epsilon = 1e-6 }}\n\
         [train]\nsteps = 2\ntokens = 100000\nlr = 1e-3\nwarmup = 1\nvalidate = 2\nsave = 10000",
        folder.path().display()
    );
    let recipe = Recipe::parse(&text, Path::new("small.toml"), &[]).unwrap();
    let path = folder.path().join("run");
    Run::new(&recipe, &path, 2).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap();
    let (describer, machine) = (Describer::open(&path).unwrap(), Machine::new(2));
    let unknown = describer.tokenizer.unk().unwrap();
    assert!(describer.tokenizer.encode("the longest").contains(&unknown));
    let images = ["a.png", "b.png"].map(|name| Image::open(folder.path().join(name)).unwrap());
    for found in describer.describe(&images, &Search::default(), &machine).unwrap().concat() {
        assert!(!found.tokens.contains(&unknown), "{found:?}");
    }
}

#[test]
fn a_question_about_a_picture_is_answered_with_maps_of_words_and_hops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let scenes = trained(&recipe("questions", "kind = 'vqa'\nhops = 2", 150), &path);
    let (vqa, machine) = (Vqa::open(&path).unwrap(), Machine::new(2));
    let (mut right, mut asked) = (0, 0);
    for (at, scene) in scenes.iter().enumerate() {
        for question in 0..6 {
            let (question, answer) = scene.question(at * 7 + question);
            let found = vqa.answer(&scene.image, &question, &machine).unwrap();
            let best = (0..found.probabilities.len())
                .max_by(|&a, &b| found.probabilities[a].total_cmp(&found.probabilities[b]));
            right += usize::from(vqa.config.labels[best.unwrap()] == answer);
            asked += 1;
            assert_eq!((found.words.len(), found.hops.len()), (found.tokens.len(), 2));
            for map in found.words.iter().chain(&found.hops) {
                assert!(map.len() == 16 && (map.iter().sum::<f32>() - 1.0).abs() < 1e-4);
            }
        }
    }
    assert!(right * 10 >= asked * 9, "{right} of {asked}");
    assert!(Inspection::of(&path).unwrap().misfits.is_empty());
}

#[test]
fn a_detector_finds_the_shapes_it_was_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let mut recipe = recipe("boxes", "kind = 'detect'\ndecoder_layers = 2", 200);
    recipe.tokenizer = Default::default();
    let scenes = trained(&recipe, &path);
    assert_eq!(kind(&path).unwrap(), "detect");
    let (detector, machine) = (Detector::open(&path).unwrap(), Machine::new(2));
    let images: Vec<Image> = scenes.iter().map(|scene| scene.image.clone()).collect();
    let found = detector.detect(&images, 0.0, &machine).unwrap();
    let found: Vec<Vec<ScoredBox>> = found.iter().map(|boxes| boxes.iter().map(ScoredBox::from).collect()).collect();
    let there = |scene: &tasks::Scene| -> Vec<ScoredBox> {
        let edges = |shape: &tasks::Shape| shape.edges.map(|x| x as f64 / tasks::SIDE as f64);
        scene.shapes.iter().map(|shape| ScoredBox { class: shape.kind, score: 1.0, edges: edges(shape) }).collect()
    };
    let there: Vec<Vec<ScoredBox>> = scenes.iter().map(there).collect();
    let scores = AveragePrecision::of(&found, &there);
    assert!(scores.at_half > 90.0, "{scores:?}");
    let looked = detector.look(&images[0], 0.5, &machine).unwrap();
    assert_eq!((looked.grid, looked.looked.len(), looked.looked[0].len()), ([4, 4], 16, 16));
    assert!((looked.looked[3].iter().sum::<f32>() - 1.0).abs() < 1e-4);
    assert!(Inspection::of(&path).unwrap().misfits.is_empty());
}

#[test]
fn models_and_data_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = |recipe: &Recipe| Run::new(recipe, folder.path().join("run"), 1).unwrap_err().to_string();
    let wrong = said(&recipe("captions", "kind = 'vqa'", 1));
    assert!(wrong.contains("a `vqa` does not learn from this data"), "{wrong}");
    let wrong = said(&recipe("questions", "kind = 'describe'", 1));
    assert!(wrong.contains("a `describe` does not learn from this data"), "{wrong}");
    let mut odd = recipe("captions", "kind = 'describe'", 1);
    if let qkv_models::ModelSource::New(qkv_models::Architecture::Describe(config)) = &mut odd.model {
        config.image.patch_size = 12;
    }
    assert!(said(&odd).contains("patches of 12 do not fill images of 32 × 32"), "{}", said(&odd));
}
