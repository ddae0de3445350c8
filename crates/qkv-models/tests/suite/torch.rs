//! PyTorch checkpoints are read without executing them, among them `latex-ocr-junia` and pix2tex, which read formulas.

use crate::archive::zip;
use qkv_models::files::tensors::Storage;
use qkv_models::files::torch::TorchFile;
use qkv_models::image::Image;
use qkv_models::{Describer, Inspection, Search, kind};
use qkv_nn::Machine;

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn numbers(of: &[usize]) -> Vec<u8> {
    let each = of.iter().flat_map(|&n| [&b"J"[..], &(n as u32).to_le_bytes()].concat());
    [b"(".to_vec(), each.collect(), b"t".to_vec()].concat()
}

/// A tensor stored in the file `key`, as `torch.save` describes it.
fn tensor(key: &str, shape: &[usize], strides: &[usize]) -> Vec<u8> {
    let storage = [text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text(key), text("cpu"), b"K\x04".to_vec()];
    let arguments = [b"((".to_vec(), storage.concat(), b"tQK\0".to_vec(), numbers(shape), numbers(strides)].concat();
    let rest = b"\x89ccollections\nOrderedDict\n)RtR".to_vec();
    [b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), arguments, rest].concat()
}

/// A checkpoint with these dictionary entries and files of values.
fn checkpoint(entries: &[(&str, Vec<u8>)], files: Vec<Vec<f32>>) -> Vec<u8> {
    let entries: Vec<u8> = entries.iter().flat_map(|(name, value)| [text(name), value.clone()].concat()).collect();
    let pickle = [b"\x80\x02}(".to_vec(), entries, b"u.".to_vec()].concat();
    let bytes = |values: Vec<f32>| values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let values = files.into_iter().enumerate().map(|(at, values)| (format!("a/data/{at}"), bytes(values)));
    zip(&[("a/data.pkl".to_owned(), pickle)].into_iter().chain(values).collect::<Vec<_>>())
}

#[test]
fn tensors_are_read_by_their_strides_and_dictionaries_by_their_names() {
    let inner = [b"}(".to_vec(), text("b"), tensor("0", &[2, 3], &[1, 2]), b"u".to_vec()].concat();
    let entries = [("a", tensor("0", &[4], &[1])), ("model", inner), ("epoch", b"K\x07".to_vec())];
    let file = TorchFile::from_bytes(checkpoint(&entries, vec![vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]), "a.pt").unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["a", "model.b"]);
    assert_eq!(file.read("a").unwrap(), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(file.read("model.b").unwrap(), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    let file = file.under("model");
    assert_eq!((file.names().collect::<Vec<_>>(), file.shape("b")), (vec!["b"], Some(&[2, 3][..])));
    assert!(file.read("c").unwrap_err().to_string().contains("tensor `c`: it is missing"));
}

#[test]
fn what_a_pickle_calls_is_never_called() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made");
    let call = [b"cos\nsystem\n(".to_vec(), text(&format!("touch {}", path.display())), b"tR".to_vec()].concat();
    let file = TorchFile::from_bytes(checkpoint(&[("x", call), ("a", tensor("0", &[1], &[1]))], vec![vec![8.0]]), "a");
    assert_eq!(file.unwrap().read("a").unwrap(), [8.0]);
    assert!(!path.exists());
}

#[test]
fn tensors_beyond_their_values_and_files_of_another_kind_are_refused() {
    let said = |entry: Vec<u8>| {
        let file = TorchFile::from_bytes(checkpoint(&[("a", entry)], vec![vec![1.0; 4]]), "a.pt").unwrap();
        file.read("a").unwrap_err().to_string()
    };
    assert!(said(tensor("0", &[5], &[1])).contains("value 4 is asked for where there are 4"));
    assert!(said(tensor("0", &[2, 2], &[3, 1])).contains("value 4 is asked for"));
    assert!(said(tensor("0", &[2, 2], &[1])).contains("its strides are [1]"));
    assert!(said(tensor("9", &[1], &[1])).contains("`data/9`, are missing"));
    let wrong = |bytes: Vec<u8>| TorchFile::from_bytes(bytes, "a.pt").unwrap_err().to_string();
    assert!(wrong(b"\x80\x02}.".to_vec()).contains("it is no zip archive"));
    assert!(wrong(zip(&[("a/b".into(), Vec::new())])).contains("it has no `data.pkl`"));
    assert!(wrong(zip(&[("a/data.pkl".into(), b"\x80\x02P".to_vec())])).contains("instruction 0x50"));
    assert!(wrong(zip(&[("a/data.pkl".into(), b"\x80\x02R.".to_vec())])).contains("empty stack"));
}

/// A `latex-ocr-junia` model whose bias determines what it writes.
#[test]
fn a_reader_of_formulas_comes_from_a_checkpoint_of_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let sizes = r#"{"image_height":8,"image_width":16,"patch_size":4,"d_model":8,"num_heads":2,"num_encoder_layers":1,
        "num_decoder_layers":1,"mlp_dim":12,"dropout":0.1,"max_length":6,"vocab_size":6,"pad_token_id":0}"#;
    write("model_config.json", sizes.as_bytes());
    let tokens = r#"{"token_to_id":{"<pad>":0,"<bos>":1,"<eos>":2,"<unk>":3,"\\":4,"x":5},
        "specials":{"pad":"<pad>","bos":"<bos>","eos":"<eos>","unk":"<unk>"}}"#;
    write("tokenizer.json", tokens.as_bytes());
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("patch_embed.proj.weight".into(), vec![8, 1, 4, 4]),
        ("patch_embed.proj.bias".into(), vec![8]),
        ("patch_embed.pos_emb".into(), vec![1, 8, 8]),
        ("decoder_embed.token_emb.weight".into(), vec![6, 8]),
        ("decoder_embed.pos_emb.weight".into(), vec![6, 8]),
        ("lm_head.weight".into(), vec![6, 8]),
    ];
    let mut linears: Vec<(String, usize, usize)> = Vec::new();
    for (block, feed) in [("encoder_blocks.0", "mlp"), ("decoder_blocks.0", "ffn")] {
        linears.extend([(format!("{block}.{feed}.0"), 12, 8), (format!("{block}.{feed}.3"), 8, 12)]);
    }
    for attention in ["encoder_blocks.0.attn", "decoder_blocks.0.self_attn", "decoder_blocks.0.cross_attn"] {
        linears.push((format!("{attention}.out_proj"), 8, 8));
        shapes.push((format!("{attention}.in_proj_weight"), vec![24, 8]));
        shapes.push((format!("{attention}.in_proj_bias"), vec![24]));
    }
    for (name, outputs, inputs) in linears {
        shapes.push((format!("{name}.weight"), vec![outputs, inputs]));
        shapes.push((format!("{name}.bias"), vec![outputs]));
    }
    let norms = ["patch_embed.norm", "encoder_norm", "decoder_embed.norm", "decoder_norm"].into_iter().chain([
        "encoder_blocks.0.norm1",
        "encoder_blocks.0.norm2",
        "decoder_blocks.0.self_norm",
        "decoder_blocks.0.cross_norm",
        "decoder_blocks.0.ffn_norm",
    ]);
    for norm in norms {
        shapes.extend(["weight", "bias"].map(|kind| (format!("{norm}.{kind}"), vec![8])));
    }
    shapes.push(("lm_head.bias".into(), vec![6]));
    let strides =
        |shape: &[usize]| (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect::<Vec<usize>>();
    let mut values: Vec<Vec<f32>> = shapes.iter().map(|(_, shape)| vec![0.0; shape.iter().product()]).collect();
    *values.last_mut().unwrap() = vec![0.0, 0.0, 0.5, 0.0, 0.0, 1.0];
    let entries = shapes.iter().enumerate().map(|(at, (name, shape))| {
        let at = at.to_string();
        [text(name), tensor(&at, shape, &strides(shape))].concat()
    });
    let inner = [b"}(".to_vec(), entries.flatten().collect(), b"u".to_vec()].concat();
    write("best.pt", &checkpoint(&[("model", inner), ("optimizer", tensor("0", &[1], &[1]))], values));
    assert_eq!(kind(folder.path()).unwrap(), "describe");
    let inspected = Inspection::of(folder.path()).unwrap();
    assert!(inspected.misfits.is_empty(), "{:?}", inspected.misfits);
    let describer = Describer::open(folder.path()).unwrap();
    let image = Image::new(20, 5, 1, vec![99; 100]).unwrap();
    let found = describer.describe(&[image], &Search::greedy(), &Machine::new(1)).unwrap();
    assert_eq!(found[0][0].text, "xxxxx");
}

/// The tensors of a small pix2tex; the widths of its ResNet are fixed in its code.
fn pix2tex_shapes() -> Vec<(String, Vec<usize>)> {
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("encoder.cls_token".into(), vec![1, 1, 32]),
        ("encoder.pos_embed".into(), vec![1, 13, 32]),
        ("encoder.patch_embed.proj.weight".into(), vec![32, 1024, 1, 1]),
        ("encoder.patch_embed.proj.bias".into(), vec![32]),
        ("decoder.net.token_emb.weight".into(), vec![6, 32]),
        ("decoder.net.pos_emb.emb.weight".into(), vec![8, 32]),
    ];
    let mut conv = |conv: String, norm: String, [outputs, inputs, side]: [usize; 3]| {
        shapes.push((format!("encoder.patch_embed.backbone.{conv}.weight"), vec![outputs, inputs, side, side]));
        let both = ["weight", "bias"].map(|kind| format!("encoder.patch_embed.backbone.{norm}.{kind}"));
        shapes.extend(both.map(|name| (name, vec![outputs])));
    };
    conv("stem.conv".into(), "stem.norm".into(), [64, 1, 7]);
    for (stage, [inputs, inner, outputs]) in [[64, 64, 256], [256, 128, 512], [512, 256, 1024]].into_iter().enumerate()
    {
        let at = |name: &str| format!("stages.{stage}.blocks.0.{name}");
        conv(at("downsample.conv"), at("downsample.norm"), [outputs, inputs, 1]);
        conv(at("conv1"), at("norm1"), [inner, inputs, 1]);
        conv(at("conv2"), at("norm2"), [inner, inner, 3]);
        conv(at("conv3"), at("norm3"), [outputs, inner, 1]);
    }
    let mut linear = |name: &str, shape: &[usize], bias: bool| {
        shapes.push((format!("{name}.weight"), shape.to_vec()));
        shapes.extend(bias.then(|| (format!("{name}.bias"), vec![shape[0]])));
    };
    for norm in ["encoder.blocks.0.norm1", "encoder.blocks.0.norm2", "encoder.norm", "decoder.net.norm"] {
        linear(norm, &[32], true);
    }
    linear("encoder.blocks.0.attn.qkv", &[96, 32], true);
    linear("encoder.blocks.0.attn.proj", &[32, 32], true);
    linear("encoder.blocks.0.mlp.fc1", &[128, 32], true);
    linear("encoder.blocks.0.mlp.fc2", &[32, 128], true);
    linear("decoder.net.to_logits", &[6, 32], true);
    let layers = "decoder.net.attn_layers.layers";
    for part in 0..3 {
        linear(&format!("{layers}.{part}.0"), &[32], true);
    }
    for part in 0..2 {
        for projection in ["q", "k", "v"] {
            linear(&format!("{layers}.{part}.1.to_{projection}"), &[128, 32], false);
        }
        linear(&format!("{layers}.{part}.1.to_out.0"), &[64, 128], true);
    }
    linear(&format!("{layers}.2.1.net.0.proj"), &[256, 32], true);
    linear(&format!("{layers}.2.1.net.2"), &[32, 128], true);
    shapes.sort();
    shapes
}

/// A folder in pix2tex's layout, with these values of each tensor.
fn pix2tex(values: impl Fn(usize, &str, usize) -> Vec<f32>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    let settings = "channels: 1\ndim: 32\nheads: 2\nencoder_depth: 1\nnum_layers: 1\nbackbone_layers:\n- 1\n- 1\n- 1\n\
        max_height: 32\nmax_width: 96\npatch_size: 16 # pixels\nmax_seq_len: 8\nnum_tokens: 6\n\
        decoder_args:\n  cross_attend: true\n  attn_on_attn: true\n  ff_glu: true\n  use_scalenorm: false\n";
    write("settings/config.yaml", settings.as_bytes());
    let special = |id: usize, name: &str| {
        format!(
            r#"{{"id":{id},"special":true,"content":"{name}","single_word":false,"lstrip":false,"rstrip":false,
                "normalized":false}}"#
        )
    };
    let specials = ["[PAD]", "[BOS]", "[EOS]"].into_iter().enumerate().map(|(id, name)| special(id, name));
    let tokens = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{}],"normalizer":null,
            "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true}},
            "post_processor":null,"decoder":null,"model":{{"dropout":null,"unk_token":null,
            "continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
            "vocab":{{"[PAD]":0,"[BOS]":1,"[EOS]":2,"x":3,"y":4,"Ġ":5}},"merges":[]}}}}"#,
        specials.collect::<Vec<_>>().join(",")
    );
    write("dataset/tokenizer.json", tokens.as_bytes());
    let strides =
        |shape: &[usize]| (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect::<Vec<usize>>();
    let shapes = pix2tex_shapes();
    let files = shapes.iter().enumerate().map(|(at, (name, shape))| values(at, name, shape.iter().product()));
    let files: Vec<Vec<f32>> = files.collect();
    let entry = |(at, (name, shape)): (usize, &(String, Vec<usize>))| -> (String, Vec<u8>) {
        (name.clone(), tensor(&at.to_string(), shape, &strides(shape)))
    };
    let entries: Vec<(String, Vec<u8>)> = shapes.iter().enumerate().map(entry).collect();
    let named: Vec<(&str, Vec<u8>)> = entries.iter().map(|(name, entry)| (name.as_str(), entry.clone())).collect();
    write("checkpoints/weights.pth", &checkpoint(&named, files));
    folder
}

/// The values of a tensor; `dev/pix2tex.py` passes the same to the original code.
fn sines(at: usize, _: &str, len: usize) -> Vec<f32> {
    (0..len).map(|i| (0.5 * (0.7 * i as f64 + at as f64).sin()) as f32).collect()
}

fn drawn_by_a_formula(width: usize, height: usize) -> Image {
    let point = |at: usize| if (7 * (at % width) + 13 * (at / width)) % 11 < 2 { 0 } else { 255 };
    Image::new(width, height, 1, (0..width * height).map(point).collect()).unwrap()
}

#[test]
fn pix2tex_writes_what_its_own_code_writes() {
    let folder = pix2tex(sines);
    assert_eq!(kind(folder.path()).unwrap(), "describe");
    let inspected = Inspection::of(folder.path()).unwrap();
    assert!(inspected.misfits.is_empty(), "{:?}", inspected.misfits);
    let describer = Describer::open(folder.path()).unwrap();
    let machine = Machine::new(1);
    let images = [drawn_by_a_formula(70, 30), drawn_by_a_formula(20, 30), drawn_by_a_formula(70, 30)];
    let found = describer.describe(&images, &Search::greedy(), &machine).unwrap();
    assert_eq!((&found[0][0].text[..], &found[0]), ("yyyyyyy", &found[2]));
    assert!((found[0][0].log_probability + 0.92439).abs() < 2e-4, "{}", found[0][0].log_probability);
    // An image of another size has other places; the class token is not one of them.
    for (image, grid) in images.iter().zip([[2, 6], [2, 2]]) {
        let looked = describer.look_at(image, &found[0][0].tokens[..1], &machine).unwrap();
        assert_eq!((looked.grid, looked.weights[0].len()), (grid, grid[0] * grid[1]));
    }
    // The model can be saved in qkv's own format and stays the same.
    let saved = tempfile::tempdir().unwrap();
    describer.save(saved.path(), Storage::F32).unwrap();
    let again = Describer::open(saved.path()).unwrap();
    assert_eq!(again.describe(&images, &Search::greedy(), &machine).unwrap(), found);
}

#[test]
fn the_scale_and_the_mean_of_a_standardized_convolution_do_not_matter() {
    let moved = |at: usize, name: &str, len: usize| {
        let change = |x: f32| if name.contains("backbone") && name.contains("conv") { 3.0 * x + 0.25 } else { x };
        sines(at, name, len).into_iter().map(change).collect()
    };
    let image = [drawn_by_a_formula(50, 20)];
    let [one, other] = [pix2tex(sines), pix2tex(moved)].map(|folder| {
        let describer = Describer::open(folder.path()).unwrap();
        describer.describe(&image, &Search::greedy(), &Machine::new(1)).unwrap()[0][0].log_probability
    });
    assert!((one - other).abs() < 2e-3 * one.abs().max(1.0), "{one}, {other}");
}
