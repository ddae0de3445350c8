//! Descriptions as Python code, which `repr` returns and `eval` reads back.

use crate::description::to_json;
use qkv::{Attention, Bias, Features, Mask, Place, Scale, Score, Select};

/// Conversion to Python code.
pub trait Spelled {
    /// The code.
    fn spelled(&self) -> String;
}

fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

impl Spelled for Mask {
    fn spelled(&self) -> String {
        let inner = |mask: &Mask| match mask {
            Mask::And(..) | Mask::Or(..) => format!("({})", mask.spelled()),
            mask => mask.spelled(),
        };
        match self {
            Mask::Full => "Mask.full()".into(),
            Mask::Causal => "Mask.causal()".into(),
            Mask::Lengths => "Mask.lengths()".into(),
            Mask::Segments => "Mask.segments()".into(),
            Mask::Bits => "Mask.bits()".into(),
            Mask::Window { left, right } => format!("Mask.window({left}, {right})"),
            Mask::Dilated { window, step } => format!("Mask.dilated({window}, {step})"),
            Mask::Strided { stride } => format!("Mask.strided({stride})"),
            Mask::Fixed { stride, summary } => format!("Mask.fixed({stride}, {summary})"),
            Mask::Longformer { window, globals } => format!("Mask.longformer({window}, {globals:?})"),
            Mask::BigBird(qkv::BigBird { block, window, globals, random, seed }) => {
                format!("Mask.bigbird(block={block}, window={window}, globals={globals}, random={random}, seed={seed})")
            }
            Mask::Blocks(qkv::Blocks { size, seen }) => {
                let row = |row: &Vec<bool>| row.iter().map(|&bit| python_bool(bit)).collect::<Vec<_>>().join(", ");
                let rows: Vec<String> = seen.iter().map(|bits| format!("[{}]", row(bits))).collect();
                format!("Mask.blocks({size}, [{}])", rows.join(", "))
            }
            Mask::Lsh(qkv::Lsh { buckets, rounds, seed }) => {
                format!("Mask.lsh(buckets={buckets}, rounds={rounds}, seed={seed})")
            }
            // `&` and `|` are left-associative: an operand of the same kind needs parentheses only on the right.
            Mask::And(a, b) => match **a {
                Mask::And(..) => format!("{} & {}", a.spelled(), inner(b)),
                _ => format!("{} & {}", inner(a), inner(b)),
            },
            Mask::Or(a, b) => match **a {
                Mask::Or(..) => format!("{} | {}", a.spelled(), inner(b)),
                _ => format!("{} | {}", inner(a), inner(b)),
            },
            Mask::Not(a) => format!("~{}", inner(a)),
            other => format!("Mask.from_json({:?})", to_json(other)),
        }
    }
}

impl Spelled for Bias {
    fn spelled(&self) -> String {
        let mut parts = Vec::new();
        if self.has_alibi() {
            parts.push("Bias.alibi()".to_string());
        }
        if self.wants_tensor() {
            parts.push("Bias.tensor()".to_string());
        }
        if let Some(reach) = self.reach() {
            parts.push(format!("Bias.relative({reach})"));
        }
        if parts.is_empty() { "Bias.none()".into() } else { parts.join(" + ") }
    }
}

impl Spelled for Features {
    fn spelled(&self) -> String {
        match self {
            Features::Elu => "Features.elu()".into(),
            Features::Relu => "Features.relu()".into(),
            Features::Favor { count, seed } => format!("Features.favor({count}, {seed})"),
            other => format!("Features.from_json({:?})", to_json(other)),
        }
    }
}

impl Spelled for Score {
    fn spelled(&self) -> String {
        match self {
            Score::Linear(features) => format!("Score.linear({})", features.spelled()),
            other => format!("Score.{}()", other.name().replace('-', "_")),
        }
    }
}

impl Spelled for Select {
    fn spelled(&self) -> String {
        match self {
            Select::Soft => "Select.soft()".into(),
            Select::Hard(choice) => format!(
                "Select.hard(sample={}, straight_through={})",
                python_bool(choice.sample),
                python_bool(choice.straight_through)
            ),
            Select::TopK(k) => format!("Select.top_k({k})"),
            Select::Sparsemax => "Select.sparsemax()".into(),
            other => format!("Select.from_json({:?})", to_json(other)),
        }
    }
}

impl Spelled for Place {
    fn spelled(&self) -> String {
        match self {
            Place::Start => "Place.start()".into(),
            Place::End => "Place.end()".into(),
            Place::Offset(offset) => format!("Place.offset({offset})"),
            Place::Given => "Place.given()".into(),
        }
    }
}

impl Spelled for Attention {
    fn spelled(&self) -> String {
        let mut code = match self.score {
            Score::Linear(features) => format!("Attention.linear({})", features.spelled()),
            score => format!("Attention.{}()", score.name().replace('-', "_")),
        };
        match self.scale {
            Scale::Own => {}
            Scale::Fixed(scale) => code += &format!(".scale({scale:?})"),
            Scale::Learned => code += ".learned_scale()",
        }
        let mut call = |name: &str, argument: Option<String>| {
            if let Some(argument) = argument {
                code += &format!(".{name}({argument})");
            }
        };
        call("temperature", self.temperature.map(|t| format!("{t:?}")));
        call("softcap", self.softcap.map(|cap| format!("{cap:?}")));
        call("bias", (self.bias != Bias::none()).then(|| self.bias.spelled()));
        call("mask", (self.mask != Mask::Full).then(|| self.mask.spelled()));
        call("place", (self.place != Place::Start).then(|| self.place.spelled()));
        call("local", self.local.map(|half| half.to_string()));
        call("select", (self.select != Select::Soft).then(|| self.select.spelled()));
        call("dropout", self.dropout.map(|dropout| format!("{:?}", dropout.p)));
        call("with_sinks", self.sinks.then(String::new));
        call("with_entropy", self.entropy.then(String::new));
        code
    }
}
