//! The cases: shapes that are odd, prime, 1, or larger than a tile; every score, mask, bias and sharing of heads.

use crate::case::{Case, Extras, Sizes};
use qkv::{Attention, Bias, BigBird, Blocks, Features, Lsh, Mask, Place, Score};

const SCORES: [Score; 6] =
    [Score::Dot, Score::ScaledDot, Score::General, Score::Additive, Score::Cosine, Score::Distance];

/// Sizes small enough for the definition, large enough to cross tiles of 64 × 128.
const ODD: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 300, 16),
    (3, 5, 7),
    (65, 129, 16),
    (17, 128, 33),
    (64, 64, 64),
    (131, 257, 5),
    (2, 2, 512),
    (70, 1, 3),
];

/// Plain attention over odd sizes, with every score.
pub fn shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, m, d) in ODD {
        for score in SCORES {
            let name = format!("{} {n}×{m}×{d}", score.name());
            // Scores of a size near 1, as they are in practice: with two pairs, an error is otherwise a matter of luck.
            let attention = Attention::new(score).scale(1.0 / (d as f64).sqrt());
            cases.push(Case::new(name, attention, Sizes::new(n, m, d), Extras::default()));
        }
    }
    for (n, m, d) in [(0, 5, 4), (5, 0, 4), (0, 0, 4), (4, 5, 0)] {
        cases.push(Case::new(format!("empty {n}×{m}×{d}"), Attention::dot(), Sizes::new(n, m, d), Extras::default()));
    }
    cases
}

/// Two widths, shared heads, a matrix per head, keys projected beforehand.
pub fn heads() -> Vec<Case> {
    let sizes = Sizes::new(13, 31, 6);
    let mut cases = Vec::new();
    for (hq, hk) in [(4, 4), (4, 2), (6, 1)] {
        for score in SCORES {
            let sizes = sizes.heads(2, hq, hk).widths(6, 9);
            cases.push(Case::new(
                format!("{} heads {hq}/{hk}", score.name()),
                Attention::new(score),
                sizes,
                Extras::default(),
            ));
        }
    }
    for score in [Score::General, Score::Additive] {
        let sizes = sizes.heads(2, 4, 2).widths(11, 3);
        let name = format!("{} of two widths", score.name());
        cases.push(Case::new(name, Attention::new(score), sizes, Extras::default()));
        let extras = Extras { matrix_per_head: true, ..Extras::default() };
        cases.push(Case::new(format!("{} with a matrix a head", score.name()), Attention::new(score), sizes, extras));
    }
    let extras = Extras { projected: true, ..Extras::default() };
    cases.push(Case::new(
        "additive with projected keys",
        Attention::additive(),
        sizes.heads(2, 4, 2).widths(8, 3),
        extras,
    ));
    // One query of many heads: the heads of a group share a tile.
    let causal = Attention::scaled_dot().mask(Mask::causal()).place(Place::End);
    cases.push(Case::new("packed group", causal, Sizes::new(2, 300, 16).heads(2, 8, 2), Extras::default()));
    cases
}

/// Scale, temperature, cap and every bias, on every score.
pub fn on_top() -> Vec<Case> {
    let sizes = Sizes::new(19, 140, 8).heads(2, 4, 2);
    let mut cases = Vec::new();
    for score in SCORES {
        let attention = Attention::new(score).scale(-0.7).temperature(1.7).softcap(2.0).bias(Bias::alibi());
        let extras = Extras { bias: Some([true; 4]), table: Some((6, true)), all_upstream: true, ..Extras::default() };
        cases.push(Case::new(format!("{} with everything on top", score.name()), attention, sizes, extras));
        let extras = Extras { scale: Some(true), all_upstream: true, ..Extras::default() };
        let attention = Attention::new(score).temperature(0.5).softcap(3.0);
        cases.push(Case::new(format!("{} with learned scales", score.name()), attention, sizes, extras));
    }
    let extras = Extras { scale: Some(false), ..Extras::default() };
    cases.push(Case::new("one learned scale", Attention::cosine(), sizes, extras));
    for axes in 0..16 {
        let axes = std::array::from_fn(|axis| axes >> axis & 1 == 1);
        let extras = Extras { bias: Some(axes), ..Extras::default() };
        let attention = Attention::scaled_dot().mask(Mask::window(60, 3));
        let sizes = Sizes::new(70, 140, 8).heads(2, 4, 2);
        cases.push(Case::new(format!("bias {axes:?}"), attention, sizes, extras));
    }
    for (reach, per_head) in [(0, false), (3, true), (200, false)] {
        let extras = Extras { table: Some((reach, per_head)), ..Extras::default() };
        let attention = Attention::scaled_dot().place(Place::End);
        cases.push(Case::new(
            format!("table {reach} {per_head}"),
            attention,
            Sizes::new(70, 140, 8).heads(2, 4, 2),
            extras,
        ));
    }
    cases.push(Case::new(
        "alibi of 12 heads",
        Attention::dot().bias(Bias::alibi()),
        sizes.heads(1, 12, 3),
        Extras::default(),
    ));
    let sharp = Extras { sharpness: Some(20.0), all_upstream: true, ..Extras::default() };
    cases.push(Case::new("sharp", Attention::scaled_dot(), Sizes::new(70, 300, 16), sharp));
    cases
}

/// Every mask that needs no data, alone and joined.
fn named_masks() -> Vec<(&'static str, Mask)> {
    let blocks =
        Blocks { size: 20, seen: (0..8).map(|r| (0..40).map(|c| (r * 5 + c * 3) % 4 == 0).collect()).collect() };
    let bigbird = |block| BigBird { block, window: 3, globals: 1, random: 2, seed: 5 };
    vec![
        ("causal", Mask::causal()),
        ("window", Mask::window(20, 4)),
        ("window of one", Mask::window(0, 0)),
        ("wide window", Mask::window(usize::MAX, 3)),
        ("dilated", Mask::dilated(20, 3)),
        ("dilated by one", Mask::dilated(20, 1)),
        ("strided", Mask::strided(9)),
        ("strided by one", Mask::strided(1)),
        ("fixed", Mask::fixed(16, 3)),
        ("longformer", Mask::longformer(10, [0, 1, 77, 130])),
        ("bigbird", Mask::bigbird(bigbird(8))),
        ("blocks", Mask::blocks(blocks)),
        ("not causal", !Mask::causal()),
        ("nothing", Mask::causal() & !Mask::causal()),
        ("joined", Mask::causal() & (Mask::window(8, 0) | Mask::strided(16)) & !Mask::window(2, 0)),
        ("either", Mask::fixed(16, 2) | !Mask::window(100, 100) | Mask::longformer(0, [5, 60])),
    ]
}

/// Every mask, at every place, alone and joined.
pub fn masks() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, mask) in named_masks() {
        for place in [Place::Start, Place::End, Place::Offset(-20), Place::Offset(90)] {
            let attention = Attention::scaled_dot().mask(mask.clone()).place(place);
            let sizes = Sizes::new(100, 200, 6).heads(1, 2, 1);
            cases.push(Case::new(format!("{name} {place:?}"), attention, sizes, Extras::default()));
        }
        let attention = Attention::scaled_dot().mask(mask);
        let extras = Extras { positions: true, all_upstream: true, ..Extras::default() };
        cases.push(Case::new(
            format!("{name} at given places"),
            attention,
            Sizes::new(100, 200, 6).heads(2, 2, 1),
            extras,
        ));
    }
    let sizes = Sizes::new(140, 200, 8).heads(3, 4, 2);
    let with = |extras: Extras| extras;
    for (name, extras) in [
        ("lengths", with(Extras { lengths: true, ..Extras::default() })),
        ("segments", with(Extras { segments: true, ..Extras::default() })),
        ("bits", with(Extras { bits: Some([true; 4]), ..Extras::default() })),
        ("bits of keys", with(Extras { bits: Some([true, false, false, true]), ..Extras::default() })),
        ("bits of queries", with(Extras { bits: Some([false, true, true, false]), ..Extras::default() })),
        (
            "all data masks",
            with(Extras { lengths: true, segments: true, bits: Some([false, false, true, true]), ..Extras::default() }),
        ),
    ] {
        cases.push(Case::new(name, Attention::scaled_dot(), sizes, extras.clone()));
        cases.push(Case::new(format!("causal {name}"), Attention::scaled_dot().mask(Mask::causal()), sizes, extras));
    }
    cases
}

/// Masks that reorder the sequence, at lengths where they do.
pub fn gathered() -> Vec<Case> {
    let scattered: Vec<usize> = (0..600).step_by(97).collect();
    let named = [
        ("causal dilated", Mask::causal() & Mask::dilated(64, 7)),
        ("strided", Mask::strided(24)),
        ("causal strided", Mask::causal() & Mask::strided(40)),
        ("fixed", Mask::fixed(40, 2)),
        ("causal fixed", Mask::causal() & Mask::fixed(40, 3)),
        ("scattered longformer", Mask::longformer(16, scattered)),
        ("strided or fixed", Mask::strided(30) | Mask::fixed(50, 1)),
    ];
    let mut cases = Vec::new();
    for (name, mask) in named {
        for place in [Place::Start, Place::End] {
            let attention = Attention::scaled_dot().mask(mask.clone()).place(place);
            let sizes = Sizes::new(520, 540, 3).heads(1, 2, 1);
            let extras = Extras { all_upstream: true, sinks: true, table: Some((9, true)), ..Extras::default() };
            cases.push(Case::new(format!("{name} gathered {place:?}"), attention, sizes, extras));
        }
    }
    let attention = Attention::additive().mask(Mask::causal() & Mask::strided(24)).dropout(0.2);
    cases.push(Case::new("additive dropped gathered", attention, Sizes::new(530, 601, 4), Extras::default()));
    cases
}

/// Sequences of several tiles, with nothing between scores and weights but a mask: full tiles that are adjacent, that
/// are not, and that lie among partial ones.
pub fn long() -> Vec<Case> {
    let every_other = |keep: fn(usize, usize) -> bool| Blocks {
        size: 64,
        seen: (0..12).map(|r| (0..12).map(|c| keep(r, c)).collect()).collect(),
    };
    let named = [
        ("full", Mask::window(usize::MAX, usize::MAX)),
        ("causal", Mask::causal()),
        ("wide window", Mask::window(310, 70)),
        ("every third tile", Mask::blocks(every_other(|r, c| (r + c / 2) % 3 == 0))),
        ("all but every fifth tile", Mask::blocks(every_other(|r, c| (r + c / 2) % 5 != 0))),
        ("with holes", !Mask::longformer(0, [100, 411])),
    ];
    let mut cases = Vec::new();
    for (name, mask) in named {
        let sizes = Sizes::new(650, 390, 6).heads(1, 2, 1);
        let attention = Attention::scaled_dot().mask(mask).place(Place::Offset(-40));
        cases.push(Case::new(format!("long {name}"), attention, sizes, Extras::default()));
    }
    let sharp = Extras { sharpness: Some(12.0), ..Extras::default() };
    cases.push(Case::new("long and sharp", Attention::scaled_dot(), Sizes::new(330, 650, 16), sharp));
    cases
}

/// Dropout and sinks, with every score and with shared heads.
pub fn selection() -> Vec<Case> {
    let sizes = Sizes::new(37, 150, 8).heads(2, 4, 2);
    let mut cases = Vec::new();
    for score in SCORES {
        let extras = Extras { sinks: true, all_upstream: true, ..Extras::default() };
        let attention = Attention::new(score).dropout(0.3).mask(Mask::causal()).place(Place::End);
        cases.push(Case::new(format!("{} dropped into sinks", score.name()), attention, sizes, extras));
    }
    let extras = Extras { sinks: true, ..Extras::default() };
    let nothing = Attention::scaled_dot().mask(!Mask::window(usize::MAX, usize::MAX));
    cases.push(Case::new("all in the sink", nothing, sizes, extras));
    cases.push(Case::new("dropout alone", Attention::scaled_dot().dropout(0.9), sizes, Extras::default()));
    cases
}

/// Hard, top-k and sparsemax, with every score; combined with masks and with everything that is added to scores.
pub fn choices() -> Vec<Case> {
    let sizes = Sizes::new(37, 150, 8).heads(2, 4, 2);
    let mut cases = Vec::new();
    for score in SCORES {
        // Scores of a size near 1 and far from ties.
        let plain = || Attention::new(score).mask(Mask::causal()).place(Place::End);
        for (name, attention) in [
            ("hard", plain().hard()),
            ("sampled", plain().sample()),
            ("straight-through", plain().sample().straight_through()),
            ("top 7", plain().top_k(7)),
            ("top 1000", plain().top_k(1000)),
            ("sparsemax", plain().sparsemax()),
        ] {
            let extras = Extras { all_upstream: true, ..Extras::default() };
            cases.push(Case::new(format!("{name} {}", score.name()), attention, sizes, extras));
        }
    }
    for attention in
        [Attention::scaled_dot().sample(), Attention::scaled_dot().top_k(9), Attention::scaled_dot().sparsemax()]
    {
        let extras = Extras {
            bias: Some([false, true, true, true]),
            table: Some((5, true)),
            scale: Some(true),
            ..Extras::default()
        };
        let name = format!("{:?} with everything on top", attention.select);
        let attention = attention.softcap(3.0).bias(Bias::alibi()).mask(Mask::window(90, 20));
        cases.push(Case::new(name, attention, sizes, extras));
    }
    for (n, m) in [(1, 1), (5, 0), (0, 5), (3, 700)] {
        for attention in [Attention::dot().hard(), Attention::dot().top_k(3), Attention::dot().sparsemax()] {
            let name = format!("{:?} {n}×{m}", attention.select);
            cases.push(Case::new(name, attention, Sizes::new(n, m, 3), Extras::default()));
        }
    }
    cases
}

/// Predictive local attention, with Luong's scores and the others.
pub fn local() -> Vec<Case> {
    let mut cases = Vec::new();
    for score in SCORES {
        for (reach, n, m) in [(1, 9, 20), (10, 70, 300)] {
            let extras = Extras { all_upstream: true, ..Extras::default() };
            let sizes = Sizes::new(n, m, 6).heads(2, 4, 2);
            cases.push(Case::new(
                format!("local {reach} {}", score.name()),
                Attention::new(score).local(reach),
                sizes,
                extras,
            ));
        }
    }
    let extras = Extras { lengths: true, sinks: true, ..Extras::default() };
    let attention = Attention::scaled_dot().local(20).dropout(0.2);
    cases.push(Case::new(
        "local with padding, dropout and sinks",
        attention,
        Sizes::new(40, 200, 8).heads(2, 2, 1),
        extras,
    ));
    cases
}

/// Hash buckets, short and long enough to be gathered.
pub fn hashed() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, m, lsh) in [
        (70, 140, Lsh { buckets: 4, rounds: 1, seed: 1 }),
        (540, 610, Lsh { buckets: 8, rounds: 1, seed: 4 }),
        (530, 601, Lsh { buckets: 8, rounds: 3, seed: 2 }),
        (601, 530, Lsh { buckets: 64, rounds: 2, seed: 3 }),
    ] {
        for mask in [Mask::full(), Mask::causal()] {
            let name = format!("{lsh:?} {n}×{m} {mask:?}");
            let extras = Extras { lsh: Some(lsh), all_upstream: true, ..Extras::default() };
            let attention = Attention::scaled_dot().mask(mask);
            cases.push(Case::new(name, attention, Sizes::new(n, m, 4).heads(2, 2, 1), extras));
        }
    }
    cases
}

/// A few queries at the end of the keys, as in decoding. Odd widths and lengths, shared heads, several pieces of a
/// cache, and every option of a score or a mask.
pub fn decoding() -> Vec<Case> {
    let at_end = |score| Attention::new(score).place(Place::End);
    let scaled = || at_end(Score::ScaledDot);
    let plain = Extras::default;
    let mut cases = Vec::new();
    for (at, d) in [1, 7, 16, 20, 65, 130].into_iter().enumerate() {
        for (n, m) in [(1, 0), (1, 1), (2, 127), (3, 128), (4, 131), (5, 300)] {
            let (hq, hk) = [(1, 1), (8, 2), (6, 1), (4, 4)][(at + n) % 4];
            let sizes = Sizes::new(n, m, d).heads(2, hq, hk).widths(d, [d, 33, 1][n % 3]);
            cases.push(Case::new(format!("decoding {n}×{m}×{d} of {hq}/{hk}"), scaled(), sizes, plain()));
        }
    }
    let sizes = Sizes::new(2, 300, 20).heads(2, 8, 2);
    for score in SCORES {
        let attention = at_end(score).scale(0.2).mask(Mask::causal());
        cases.push(Case::new(format!("decoding {}", score.name()), attention, sizes, plain()));
    }
    for (name, mask) in named_masks() {
        let sizes = Sizes::new(3, 200, 6).heads(2, 4, 2);
        cases.push(Case::new(format!("decoding {name}"), scaled().mask(mask.clone()), sizes, plain()));
        let long = Sizes::new(2, 700, 6).heads(1, 4, 1);
        cases.push(Case::new(format!("decoding long {name}"), scaled().mask(mask.clone()), long, plain()));
        let extras = Extras { positions: true, ..plain() };
        cases.push(Case::new(format!("decoding {name} at given places"), scaled().mask(mask), sizes, extras));
    }
    for (name, extras) in [
        ("lengths", Extras { lengths: true, ..plain() }),
        ("segments", Extras { segments: true, ..plain() }),
        ("bits", Extras { bits: Some([true; 4]), ..plain() }),
        ("bits of keys", Extras { bits: Some([true, false, false, true]), ..plain() }),
        ("hash buckets", Extras { lsh: Some(Lsh { buckets: 4, rounds: 2, seed: 1 }), ..plain() }),
        ("everything on top", Extras { bias: Some([true; 4]), table: Some((6, true)), sinks: true, ..plain() }),
        ("a bias of keys", Extras { bias: Some([false, false, false, true]), ..plain() }),
        ("learned scales", Extras { scale: Some(true), ..plain() }),
    ] {
        let sizes = Sizes::new(3, 300, 9).heads(3, 4, 2);
        cases.push(Case::new(format!("decoding {name}"), scaled(), sizes, extras.clone()));
        let all = scaled().mask(Mask::causal()).softcap(3.0).bias(Bias::alibi()).dropout(0.3).temperature(0.7);
        cases.push(Case::new(format!("decoding {name} with the rest"), all, sizes, extras));
    }
    cases.push(Case::new("decoding local", scaled().local(20), Sizes::new(3, 300, 9).heads(2, 4, 2), plain()));
    let long = Sizes::new(2, 9_001, 3).heads(1, 4, 2);
    cases.push(Case::new("decoding many pieces", scaled().mask(Mask::causal()), long, plain()));
    let extras = Extras { sinks: true, lengths: true, ..plain() };
    cases.push(Case::new("decoding many pieces with less", scaled().dropout(0.2), long, extras));
    cases
}

/// The feature maps of linear attention, by name.
fn maps() -> [(&'static str, Features); 3] {
    [("elu", Features::Elu), ("relu", Features::Relu), ("favor", Features::Favor { count: 21, seed: 5 })]
}

/// Linear attention: odd shapes, every mask that it supports at every place, shared heads, chunks and spans crossed.
pub fn linear() -> Vec<Case> {
    let mut cases = Vec::new();
    let both = Extras { all_upstream: true, ..Extras::default() };
    for (name, features) in maps() {
        let linear = || Attention::linear(features);
        let causal = || linear().mask(Mask::causal());
        for (n, m, d) in ODD {
            let sizes = Sizes::new(n, m, d);
            // Exponents of a size near 1, as for the scores above.
            let scaled =
                |attention: Attention| if name == "favor" { attention.scale(1.0 / d as f64) } else { attention };
            let (linear, causal) = (|| scaled(linear()), || scaled(causal()));
            cases.push(Case::new(format!("{name} {n}×{m}×{d}"), linear(), sizes, both.clone()));
            cases.push(Case::new(
                format!("causal {name} {n}×{m}×{d}"),
                causal().place(Place::End),
                sizes,
                both.clone(),
            ));
        }
        for (n, m, d) in [(0, 5, 4), (5, 0, 4), (0, 0, 4), (4, 5, 0)] {
            let name = format!("empty {name} {n}×{m}×{d}");
            cases.push(Case::new(name, linear(), Sizes::new(n, m, d), Extras::default()));
        }
        let sizes = Sizes::new(100, 200, 6).heads(1, 2, 1);
        for place in [Place::Start, Place::End, Place::Offset(-20), Place::Offset(90), Place::Offset(400)] {
            let name = format!("causal {name} {place:?}");
            cases.push(Case::new(name, causal().place(place), sizes, both.clone()));
        }
        let sizes = Sizes::new(100, 150, 8).heads(2, 4, 2).widths(8, 5);
        for (what, extras) in [
            ("heads", both.clone()),
            ("lengths", Extras { lengths: true, ..both.clone() }),
            ("segments", Extras { segments: true, ..both.clone() }),
            ("lengths and segments", Extras { lengths: true, segments: true, ..both.clone() }),
            ("places", Extras { positions: true, ..both.clone() }),
            ("everything", Extras { lengths: true, segments: true, positions: true, ..both.clone() }),
        ] {
            cases.push(Case::new(format!("{name} {what}"), linear(), sizes, extras.clone()));
            cases.push(Case::new(format!("causal {name} {what}"), causal(), sizes, extras));
        }
        // More than one span of keys.
        let long = Sizes::new(6, 2_200, 3);
        cases.push(Case::new(format!("long {name}"), linear(), long, both.clone()));
        let places = Extras { positions: true, ..both.clone() };
        cases.push(Case::new(format!("long causal {name}"), causal(), long, places));
    }
    let favor = |count, scale| Attention::linear(Features::Favor { count, seed: 9 }).scale(scale).mask(Mask::causal());
    cases.push(Case::new("one feature", favor(1, 0.5), Sizes::new(90, 90, 6), both.clone()));
    cases.push(Case::new("more features than width", favor(50, 0.3), Sizes::new(90, 90, 6), both));
    cases
}
