//! From what was typed to what was meant: the command line that `clap` reads is made from the table in `choices`, and
//! what comes out is [`Choices`], where every value has its type and no two contradict each other.

use crate::bench::{self, Shape};
use crate::choices::{CHOICES, Choice, EXAMPLES, INPUTS, Kind, OUTPUTS, Other, Table, TensorRow, any_of};
use crate::doctor::Health;
use crate::features::FeatureMap;
use crate::number::Precision;
use crate::pattern::Pattern;
use crate::place::{Local, PlaceOf, Window};
use crate::selection::Selection;
use crate::{embed, eval, explore, generate, inspect, reading, show, train, translate};
use clap::builder::{PossibleValuesParser, ValueParser};
use clap::error::{Error, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use clap_complete::Shell;
use qkv::{Place, Score, Select};
use std::ffi::OsString;
use std::path::PathBuf;

/// More threads than any machine has cores; what a pool of more would cost nobody means to pay.
const MOST_THREADS: u64 = 1024;

/// What the program was asked to do.
#[derive(Debug)]
pub(crate) enum Asked {
    /// `qkv run`.
    Run(Box<Choices>),
    /// `qkv bench`.
    Bench(Box<bench::Asked>),
    /// `qkv bench-memory`, which is hidden: what one call takes, for a process that does nothing else.
    BenchMemory(bench::Held),
    /// `qkv bench-step`, which is hidden: training steps, likewise.
    BenchStep(bench::Step),
    /// `qkv train`.
    Train(Box<train::Asked>),
    /// `qkv translate`.
    Translate(Box<translate::Asked>),
    /// `qkv show`.
    Show(Box<show::Asked>),
    /// `qkv eval`.
    Eval(Box<eval::Asked>),
    /// `qkv explore`.
    Explore(Box<explore::Asked>),
    /// `qkv generate`.
    Generate(Box<generate::Asked>),
    /// `qkv embed`.
    Embed(embed::Asked),
    /// `qkv classify`, `qkv tag` or `qkv answer`.
    Read(reading::Asked),
    /// `qkv inspect`.
    Inspect(inspect::Asked),
    /// `qkv convert`.
    Convert(inspect::Conversion),
    /// Words that are known at once: `qkv doctor`, `qkv completions`, `qkv man`, and `qkv page`, which is hidden, the page of
    /// the guide about `qkv run`.
    Words(String),
}

/// What computes the attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Engine {
    Reference,
    Exact,
    /// That of linear attention.
    Feature,
    /// A GPU's.
    Cuda,
}

impl Engine {
    pub fn name(self) -> &'static str {
        match self {
            Engine::Reference => "reference",
            Engine::Exact => "exact",
            Engine::Feature => "feature",
            Engine::Cuda => "cuda",
        }
    }
}

/// The choices of `qkv run`, one field for each in the table.
#[derive(Debug)]
pub(crate) struct Choices {
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    pub weights: bool,
    pub score: Score,
    pub scale: Option<f64>,
    pub temperature: Option<f64>,
    pub softcap: Option<f64>,
    pub alibi: bool,
    pub causal: bool,
    pub window: Option<Window>,
    pub pattern: Option<Pattern>,
    pub local: Option<usize>,
    pub place: Place,
    pub select: Select,
    pub dropout: Option<f64>,
    pub seed: u64,
    pub engine: Engine,
    pub dtype: Option<Precision>,
    pub threads: Option<usize>,
    pub json: bool,
}

/// Reads a command line. The error is help that was asked for, or misuse; it knows which, and its exit code.
pub(crate) fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Asked, Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    let Some((name, matches)) = matches.subcommand() else { unreachable!("a command is required") };
    let table = TABLES.iter().find(|(command, _)| *command == name).map_or(&[][..], |(_, table)| table);
    let asked = go_together(table, matches).and_then(|()| match name {
        "run" => choices(matches).map(|choices| Asked::Run(Box::new(choices))),
        "bench" => Ok(Asked::Bench(Box::new(bench::Asked::read(matches)))),
        "bench-memory" => Ok(Asked::BenchMemory(bench::Held::read(matches))),
        "bench-step" => Ok(Asked::BenchStep(bench::Step::read(matches))),
        "train" => train::Asked::read(matches).map(|asked| Asked::Train(Box::new(asked))),
        "translate" => Ok(Asked::Translate(Box::new(translate::Asked::read(matches)))),
        "show" => show::Asked::read(matches).map(|asked| Asked::Show(Box::new(asked))),
        "eval" => eval::Asked::read(matches).map(|asked| Asked::Eval(Box::new(asked))),
        "explore" => explore::Asked::read(matches).map(|asked| Asked::Explore(Box::new(asked))),
        "generate" => generate::Asked::read(matches).map(|asked| Asked::Generate(Box::new(asked))),
        "embed" => embed::Asked::read(matches).map(Asked::Embed),
        "classify" => reading::Asked::read(reading::Task::Classify, matches).map(Asked::Read),
        "tag" => reading::Asked::read(reading::Task::Tag, matches).map(Asked::Read),
        "answer" => reading::Asked::read(reading::Task::Answer, matches).map(Asked::Read),
        "inspect" => inspect::Asked::read(matches).map(Asked::Inspect),
        "convert" => inspect::Conversion::read(matches).map(Asked::Convert),
        "doctor" => {
            let health = Health::of_this_machine();
            Ok(Asked::Words(if matches.get_flag("json") { health.json() } else { health.to_string() }))
        }
        "completions" => Ok(Asked::Words(completions(*matches.get_one("shell").expect("it is required")))),
        "man" => man(matches.get_one("command")).map(Asked::Words),
        _ => Ok(Asked::Words(crate::page())),
    });
    asked.map_err(|conflict| misuse(&mut command, name, conflict))
}

/// The choices of each command that has a table of them.
const TABLES: &[(&str, Table)] = &[
    ("run", CHOICES),
    ("bench", bench::CHOICES),
    ("train", train::CHOICES),
    ("translate", translate::CHOICES),
    ("show", show::CHOICES),
    ("eval", eval::CHOICES),
    ("explore", explore::CHOICES),
    ("generate", generate::CHOICES),
    ("embed", embed::CHOICES),
    ("classify", reading::CLASSIFY),
    ("tag", reading::TAG),
    ("answer", reading::ANSWER),
    ("inspect", inspect::CHOICES),
    ("convert", inspect::CONVERT),
];

fn misuse(command: &mut Command, name: &str, conflict: String) -> Error {
    command.find_subcommand_mut(name).expect("just matched").error(ErrorKind::ArgumentConflict, conflict)
}

fn command() -> Command {
    let run = Command::new("run")
        .about("Computes attention, forward and backward, from a file of tensors")
        .after_help("`qkv run --help` says what each value means, and which tensors the files hold")
        .after_long_help(after_help());
    let bench = Command::new("bench")
        .about("Measures attention on this machine, beside its peak and beside PyTorch")
        .after_help("`qkv bench --help` says what each value means, and what is measured")
        .after_long_help(bench::after_help());
    let train = Command::new("train")
        .about("Trains a model from a recipe, or goes on training it")
        .after_help("`qkv train --help` says what each value means, and has examples")
        .after_long_help(train::after_help());
    let translate = Command::new("translate")
        .about("Translates lines, and draws what the model looked at")
        .after_help("`qkv translate --help` says what each value means, and has examples")
        .after_long_help(translate::after_help());
    let show = Command::new("show")
        .about("Shows what a model attended to: drawn, printed, measured, as data")
        .after_help("`qkv show --help` says what each value means, and has examples")
        .after_long_help(show::after_help());
    let eval = Command::new("eval")
        .about("Measures translations: BLEU, chrF, exact match, perplexity")
        .after_help("`qkv eval --help` says what each value means, and has examples")
        .after_long_help(eval::after_help());
    let explore = Command::new("explore")
        .about("Serves a page that shows what a model attends to")
        .after_help("`qkv explore --help` says what each value means, and has examples")
        .after_long_help(explore::after_help());
    let generate = Command::new("generate")
        .about("Goes on with a text, or holds a conversation, and is heard as it speaks")
        .after_help("`qkv generate --help` says what each value means, and has examples")
        .after_long_help(generate::after_help());
    let embed = Command::new("embed")
        .about("Turns sentences into vectors: near ones mean alike")
        .after_help("`qkv embed --help` says what each value means, and has examples")
        .after_long_help(embed::after_help());
    let reading = [
        ("classify", "Says which class a text belongs to", reading::after_classify_help(), reading::CLASSIFY),
        ("tag", "Gives each word of a text a tag: names, places", reading::after_tag_help(), reading::TAG),
        ("answer", "Finds the words of a text that answer a question", reading::after_answer_help(), reading::ANSWER),
    ];
    let reading = reading.map(|(name, about, help, table)| {
        let hint = format!("`qkv {name} --help` says what each value means, and has examples");
        with(Command::new(name).about(about).after_help(hint).after_long_help(help), table)
    });
    let inspect = Command::new("inspect")
        .about("Lists the tensors of a checkpoint, and what does not fit")
        .after_long_help(inspect::after_help());
    let convert = Command::new("convert")
        .about("Writes a model as a folder that Python's `transformers` reads")
        .after_long_help(inspect::after_convert_help());
    let shell = Arg::new("shell").required(true).value_parser(value_parser!(Shell)).help("The shell");
    let name = Arg::new("command").value_name("COMMAND").help("The page of this command; left out, the program's");
    let json = Arg::new("json").long("json").action(ArgAction::SetTrue).help("One JSON object");
    Command::new("qkv")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Attention: every mechanism, forward and backward, exact, in linear memory; and models that train and translate")
        .after_help("Exit codes: 0 done, 1 an expected failure, 2 misuse, 130 interrupted after saving")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(with(translate, translate::CHOICES))
        .subcommand(with(explore, explore::CHOICES))
        .subcommand(with(show, show::CHOICES))
        .subcommand(with(generate, generate::CHOICES))
        .subcommand(with(embed, embed::CHOICES))
        .subcommands(reading)
        .subcommand(with(train, train::CHOICES))
        .subcommand(with(eval, eval::CHOICES))
        .subcommand(with(inspect, inspect::CHOICES))
        .subcommand(with(convert, inspect::CONVERT))
        .subcommand(with(run, CHOICES))
        .subcommand(with(bench, bench::CHOICES))
        .subcommand(bench::Held::command())
        .subcommand(bench::Step::command())
        .subcommand(
            Command::new("doctor")
                .about("Says what this machine has: CPU features, kernels, threads, the embedded model")
                .after_help(examples(&[("qkv doctor", "Everything"), ("qkv doctor --json", "For programs")]))
                .arg(json),
        )
        .subcommand(
            Command::new("completions")
                .about("Prints completions for a shell")
                .after_help(examples(&[(
                    "qkv completions bash > ~/.local/share/bash-completion/completions/qkv",
                    "For one user of bash",
                )]))
                .arg(shell),
        )
        .subcommand(
            Command::new("man")
                .about("Prints a page of the manual")
                .after_help(examples(&[("qkv man translate | man -l -", "Read it")]))
                .arg(name),
        )
        .subcommand(Command::new("page").hide(true).about("Prints the guide's page about `qkv run`, `docs/run.md`"))
}

/// Completions, from the same table as help.
fn completions(shell: Shell) -> String {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut command(), "qkv", &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A page of the manual, from the same table as help.
fn man(name: Option<&String>) -> Result<String, String> {
    let mut command = command();
    command.build();
    let command = match name {
        None => command,
        Some(name) => {
            let found = command.get_subcommands().find(|command| command.get_name() == name && !command.is_hide_set());
            found.cloned().ok_or_else(|| format!("there is no command `{name}`"))?
        }
    };
    let title = command.get_display_name().unwrap_or("qkv").to_owned();
    let mut bytes = Vec::new();
    let page = clap_mangen::Man::new(command.name(title)).render(&mut bytes);
    page.map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Examples and exit codes, as help ends with them.
pub(crate) fn examples(examples: &[(&str, &str)]) -> String {
    let lines: String = examples.iter().map(|(command, what)| format!("  # {what}\n  {command}\n")).collect();
    format!("Examples:\n{lines}\nExit codes: 0 done, 1 an expected failure, 2 misuse, 130 interrupted after saving")
}

/// The command with the choices of a table.
fn with(command: Command, table: Table) -> Command {
    let choices = table.iter().flat_map(|(heading, choices)| choices.iter().map(move |choice| (heading, choice)));
    choices.fold(command.next_line_help(true), |command, (heading, choice)| {
        command.arg(argument(choice).help_heading(*heading))
    })
}

fn argument(choice: &Choice) -> Arg {
    // Defaults are told here and applied in `choices`, so that "was it given?" keeps its meaning.
    let short = choice.told();
    let width = choice.values.iter().map(|(value, _)| value.len()).max().unwrap_or(0);
    let long = choice.values.iter().fold(short.clone(), |long, (value, meaning)| {
        format!("{long}\n  {value:width$}  {meaning}") // one line a value
    });
    let argument = Arg::new(choice.name).help(short).long_help(long);
    let argument = if choice.bare { argument } else { argument.long(choice.name) };
    if choice.kind == Kind::Switch {
        return argument.action(ArgAction::SetTrue);
    }
    let argument = argument.value_name(choice.typed()).value_parser(parser(choice)).hide_possible_values(true);
    let argument = if choice.many { argument.action(ArgAction::Append) } else { argument };
    let argument = match choice.alone {
        Some(value) => argument.num_args(0..=1).require_equals(true).default_missing_value(value),
        None => argument,
    };
    // A minus sign begins a scale, a place, or a mistake that deserves the value's own message.
    argument.allow_negative_numbers(!matches!(choice.kind, Kind::Path | Kind::Text))
}

fn parser(choice: &Choice) -> ValueParser {
    match choice.kind {
        Kind::Switch | Kind::Path => value_parser!(PathBuf),
        Kind::Word => PossibleValuesParser::new(choice.values.iter().map(|(word, _)| *word)).into(),
        Kind::Finite => ValueParser::new(|typed: &str| number(typed, "a finite number", f64::is_finite)),
        Kind::Positive => {
            ValueParser::new(|typed: &str| number(typed, "a finite number above 0", |x| x.is_finite() && x > 0.0))
        }
        Kind::Probability => ValueParser::new(|typed: &str| {
            number(typed, "a probability, at least 0 and less than 1", |p| (0.0..1.0).contains(&p))
        }),
        Kind::Seed => value_parser!(u64).into(),
        Kind::Threads => value_parser!(u64).range(1..=MOST_THREADS).into(),
        Kind::Window => value_parser!(Window).into(),
        Kind::Place => value_parser!(PlaceOf).into(),
        Kind::Pattern => value_parser!(Pattern).into(),
        Kind::Local => value_parser!(Local).into(),
        Kind::Selection => value_parser!(Selection).into(),
        Kind::Features => value_parser!(FeatureMap).into(),
        Kind::Shape => value_parser!(Shape).into(),
        Kind::Text => ValueParser::string(),
        Kind::Count => value_parser!(u64).range(1..=1000).into(),
        Kind::Whole => value_parser!(u64).range(..=1 << 30).into(),
        Kind::Tokens => value_parser!(u64).range(1..=1 << 20).into(),
        Kind::Share => {
            ValueParser::new(|typed: &str| number(typed, "a number between 0 and 1", |p| (0.0..=1.0).contains(&p)))
        }
        Kind::Rounds => value_parser!(u64).range(bench::FEWEST_ROUNDS..=1000).into(),
        Kind::Length => value_parser!(u64).range(bench::SHORTEST..=1 << 20).into(),
    }
}

fn number(typed: &str, expected: &str, fits: impl Fn(f64) -> bool) -> Result<f64, String> {
    typed.parse().ok().filter(|&x| fits(x)).ok_or_else(|| format!("expected {expected}"))
}

/// Checks that every choice that was typed has what it needs, and nothing that it cannot go with.
fn go_together(table: Table, matches: &ArgMatches) -> Result<(), String> {
    let typed = |choice: &&Choice| matches.value_source(choice.name) == Some(ValueSource::CommandLine);
    let is_there = |other: &&Other| is_there(matches, other);
    for choice in table.iter().flat_map(|(_, choices)| *choices).filter(typed) {
        if !choice.needs.is_empty() && !choice.needs.iter().any(|other| is_there(&other)) {
            return Err(format!("`{}` needs {}", choice.called(), any_of(choice.needs)));
        }
        if let Some(other) = choice.clashes.iter().find(is_there) {
            return Err(format!("`{}` cannot go with `--{other}`", choice.called()));
        }
    }
    Ok(())
}

/// Whether another choice was typed, with the value that it is about if it is about one.
fn is_there(matches: &ArgMatches, other: Other) -> bool {
    let (name, value) = other.split_once(' ').map_or((other, None), |(name, value)| (name, Some(value)));
    let word = |form: &str| form.split(':').next().map(str::to_string);
    let typed = matches.get_raw(name).and_then(|mut raw| raw.next()).and_then(|raw| raw.to_str());
    matches.value_source(name) == Some(ValueSource::CommandLine)
        && value.is_none_or(|value| typed.and_then(word) == word(value))
}

fn choices(matches: &ArgMatches) -> Result<Choices, String> {
    let number = |name: &str| matches.get_one::<f64>(name).copied();
    let word = |name: &str| matches.get_one::<String>(name).map(String::as_str);
    let path = |name: &str| matches.get_one::<PathBuf>(name).cloned();
    let scores = [Score::Dot, Score::ScaledDot, Score::General, Score::Additive, Score::Cosine, Score::Distance];
    let score = scores.into_iter().find(|score| word("score") == Some(score.name())).unwrap_or_default();
    let causal = word("causal");
    let seed = matches.get_one("seed").copied().unwrap_or(0);
    let features = matches.get_one("features").map(|map: &FeatureMap| map.features(seed));
    let selection: Selection = matches.get_one("select").copied().unwrap_or_default();
    Ok(Choices {
        input: path("input"),
        output: path("output"),
        weights: matches.get_flag("weights"),
        score: features.map_or(score, Score::Linear),
        scale: number("scale"),
        temperature: number("temperature"),
        softcap: number("softcap"),
        alibi: matches.get_flag("alibi"),
        causal: causal.is_some(),
        window: matches.get_one("window").copied(),
        pattern: matches.get_one("pattern").copied(),
        local: matches.get_one("local").map(|&Local(half_width)| half_width),
        place: place(causal, matches.get_one("place").map(|&PlaceOf(place)| place))?,
        select: selection.select(matches.get_flag("straight-through")),
        dropout: number("dropout"),
        seed,
        engine: match features {
            _ if word("device") == Some("cuda") && word("engine") == Some("reference") => {
                return Err(
                    "`--engine reference` cannot go with `--device cuda`: the definition is computed on the CPU".into(),
                );
            }
            _ if word("device") == Some("cuda") => Engine::Cuda,
            _ if word("engine") == Some("reference") => Engine::Reference,
            Some(_) => Engine::Feature,
            None => Engine::Exact,
        },
        dtype: word("dtype").and_then(Precision::named),
        threads: matches.get_one::<u64>("threads").and_then(|&threads| usize::try_from(threads).ok()),
        json: matches.get_flag("json"),
    })
}

/// The place that `--causal` and `--place` agree on. An offset counts from the start, so it goes with `--causal start`.
fn place(causal: Option<&str>, place: Option<Place>) -> Result<Place, String> {
    let clash = |causal, place| {
        Err(format!("`--causal {causal}` cannot go with `--place {place}`: each says where the queries stand"))
    };
    match (causal, place) {
        (Some("end"), None | Some(Place::End)) => Ok(Place::End),
        (Some("end"), Some(Place::Offset(offset))) => clash("end", offset.to_string()),
        (Some("end"), Some(_)) => clash("end", "start".into()),
        (Some(_), Some(Place::End)) => clash("start", "end".into()),
        (_, place) => Ok(place.unwrap_or_default()),
    }
}

fn after_help() -> String {
    let mut help = String::new();
    for (heading, rows) in [("Tensors that are read", INPUTS), ("Tensors that are written", OUTPUTS)] {
        help += &format!("{heading}:\n{}\n", tensors(rows));
    }
    help += "  B sequences, Hq and Hk query and key heads, N queries, M keys, D, Dk and Dv widths.\n";
    help += "  Float tensors may be F32, F64, BF16 or F16, integers of any type. A tensor that is there is used.\n\n";
    help += "Examples:\n";
    for (command, what) in EXAMPLES {
        help += &format!("  # {what}\n  {command}\n");
    }
    help + "\nExit codes: 0 done, 1 an expected failure (a file, a shape), 2 misuse"
}

fn tensors(rows: &[TensorRow]) -> String {
    rows.iter().map(|(name, shape, what)| format!("  {name:13}  {shape:18}  {what}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_makes_a_command_line_that_holds_together() {
        command().debug_assert();
    }

    #[test]
    fn choices_need_and_clash_with_choices_and_values_that_there_are() {
        for (_, table) in TABLES {
            let all = || table.iter().flat_map(|(_, choices)| *choices);
            for other in all().flat_map(|choice| choice.needs.iter().chain(choice.clashes)) {
                let (name, value) = other.split_once(' ').map_or((*other, None), |(name, value)| (name, Some(value)));
                let found = all().find(|choice| choice.name == name).unwrap_or_else(|| panic!("no `--{name}`"));
                let known = |value: &str| found.values.iter().any(|(known, _)| *known == value);
                assert!(value.is_none_or(known), "`--{other}`");
            }
        }
    }

    #[test]
    fn every_choice_is_on_its_page() {
        let train = include_str!("../../../docs/train.md");
        let translate = include_str!("../../../docs/translate.md");
        let explore = include_str!("../../../docs/explore.md");
        let show = include_str!("../../../docs/show.md");
        let generate = include_str!("../../../docs/generate.md");
        let classify = include_str!("../../../docs/classify.md");
        let pages = [
            (train::CHOICES, train),
            (translate::CHOICES, translate),
            (eval::CHOICES, translate),
            (explore::CHOICES, explore),
            (show::CHOICES, show),
            (generate::CHOICES, generate),
            (embed::CHOICES, generate),
            (reading::CLASSIFY, classify),
            (reading::TAG, generate),
            (reading::ANSWER, generate),
            (inspect::CHOICES, generate),
            (inspect::CONVERT, generate),
        ];
        for (table, page) in pages {
            for choice in table.iter().flat_map(|(_, choices)| *choices).filter(|choice| !choice.bare) {
                assert!(page.contains(&format!("`--{}", choice.name)), "no `--{}`", choice.name);
            }
        }
    }

    #[test]
    fn causal_and_place_agree_or_are_refused() {
        assert_eq!(place(None, None), Ok(Place::Start));
        assert_eq!(place(Some("start"), None), Ok(Place::Start));
        assert_eq!(place(Some("start"), Some(Place::Offset(3))), Ok(Place::Offset(3)));
        assert_eq!(place(Some("end"), None), Ok(Place::End));
        assert_eq!(place(Some("end"), Some(Place::End)), Ok(Place::End));
        assert_eq!(place(None, Some(Place::End)), Ok(Place::End));
        assert!(place(Some("end"), Some(Place::Start)).is_err());
        assert!(place(Some("end"), Some(Place::Offset(0))).is_err());
        assert!(place(Some("start"), Some(Place::End)).is_err());
    }
}
