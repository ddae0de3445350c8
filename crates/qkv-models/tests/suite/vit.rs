//! Vision models are read back from their folders unchanged, with tensor names that others read; malformed folders are
//! refused.

use qkv_models::files::tensors::{Storage, TensorFile};
use qkv_models::image::Image;
use qkv_models::{Classifier, Inspection, Vit, VitConfig};
use qkv_nn::Machine;

fn vit(channels: usize) -> Vit {
    let labels = ["dark", "light"].map(String::from).to_vec();
    let sizes = VitConfig {
        image_size: 8,
        patch_size: 4,
        channels,
        d_model: 16,
        ffn_dim: 24,
        heads: 2,
        layers: 2,
        ..VitConfig::default()
    };
    Vit::new(&VitConfig { labels, ..sizes }, 3).unwrap()
}

fn images() -> Vec<Image> {
    let ramp = |width: usize, height: usize, channels: usize| {
        let points = (0..width * height * channels).map(|at| (at * 7 % 256) as u8).collect();
        Image::new(width, height, channels, points).unwrap()
    };
    vec![ramp(8, 8, 1), ramp(20, 13, 3), ramp(3, 9, 1)]
}

#[test]
fn an_image_of_any_size_is_seen_the_same_alone_and_beside_others() {
    for channels in [1, 3] {
        let (vit, machine) = (vit(channels), Machine::new(2));
        let together = vit.classify(&images(), &machine).unwrap();
        for (image, row) in images().iter().zip(&together) {
            let alone = vit.classify(std::slice::from_ref(image), &machine).unwrap();
            assert!(alone[0].iter().zip(row).all(|(a, b)| (a - b).abs() < 1e-6));
            let observed = vit.observe(image, &machine).unwrap();
            assert!(observed.probabilities.iter().zip(row).all(|(a, b)| (a - b).abs() < 1e-6));
            assert_eq!((observed.attentions.len(), observed.image.width()), (2, 8));
            let weights = observed.attentions[1].weights(1).unwrap();
            assert_eq!(weights.shape(), [5, 5]);
            assert!((weights.data()[..5].iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }
}

#[test]
fn patches_are_cut_where_they_stand() {
    // Only the last patch changes, and with it the result.
    let (vit, machine) = (vit(1), Machine::new(1));
    let mut points = vec![9; 64];
    let one = vit.classify(&[Image::new(8, 8, 1, points.clone()).unwrap()], &machine).unwrap();
    points[63] = 255;
    let other = vit.classify(&[Image::new(8, 8, 1, points).unwrap()], &machine).unwrap();
    assert_ne!(one, other);
}

#[test]
fn a_folder_has_the_names_of_others_and_gives_the_model_back() {
    let (vit, machine) = (vit(3), Machine::new(1));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m");
    vit.save(&path, Storage::F32).unwrap();
    let file = TensorFile::open(path.join("model.safetensors")).unwrap();
    for (name, shape) in [
        ("vit.embeddings.cls_token", &[1, 1, 16][..]),
        ("vit.embeddings.position_embeddings", &[1, 5, 16]),
        ("vit.embeddings.patch_embeddings.projection.weight", &[16, 3, 4, 4]),
        ("vit.encoder.layer.1.attention.attention.query.weight", &[16, 16]),
        ("vit.layernorm.bias", &[16]),
        ("classifier.weight", &[2, 16]),
    ] {
        assert_eq!(file.shape(name), Some(shape), "{name}");
    }
    let again = Classifier::open(&path).unwrap();
    assert_eq!(again.images(&images(), &machine).unwrap(), vit.classify(&images(), &machine).unwrap());
    assert!(again.texts(&["a"], &machine).unwrap_err().to_string().contains("reads no text"));
    let found = Inspection::of(&path).unwrap();
    assert_eq!((found.misfits.len(), found.parameters), (0, Some(vit.parameters.count())));
    assert!(found.model.unwrap().contains("images of 8 × 8 × 3 in patches of 4"));
}

#[test]
fn folders_that_lie_are_refused_with_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m");
    vit(1).save(&path, Storage::F32).unwrap();
    let config = std::fs::read_to_string(path.join("config.json")).unwrap();
    for (from, to, what) in [
        ("\"patch_size\": 4", "\"patch_size\": 3", "do not fill"),
        ("\"patch_size\": 4", "\"patch_size\": 0", "`patch_size` is 0"),
        ("\"image_size\": 8", "\"image_size\": 4000000000", "asks for"),
        ("\"image_size\": 8", "\"image_size\": 16", "its shape is"),
        ("\"num_channels\": 1", "\"num_channels\": 7", "num_channels"),
        ("\"hidden_act\": \"gelu\"", "\"hidden_act\": \"swish\"", "`swish` is not known"),
        ("\"qkv_bias\": true", "\"qkv_bias\": false", "qkv_bias"),
    ] {
        assert!(config.contains(from), "{from}: {config}");
        std::fs::write(path.join("config.json"), config.replace(from, to)).unwrap();
        let said = Vit::open(&path).unwrap_err().to_string();
        assert!(said.contains(what), "{to}: {said}");
    }
    std::fs::write(path.join("config.json"), &config).unwrap();
    std::fs::write(path.join("preprocessor_config.json"), r#"{"image_mean": [0.5, 0.5]}"#).unwrap();
    assert!(Vit::open(&path).unwrap_err().to_string().contains("image_mean"));
    std::fs::remove_file(path.join("preprocessor_config.json")).unwrap();
    assert!(Vit::open(&path).is_ok());
}
