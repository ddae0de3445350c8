//! The events: their titles, sentences and questions.

use super::names::{people, places, river};
use super::{Facts, StoryEvent};
use crate::draws::Draws;

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const TRADES: [&str; 10] = [
    "a baker",
    "a teacher",
    "a fisherman",
    "a nurse",
    "a carpenter",
    "a farmer",
    "a student",
    "a painter",
    "a doctor",
    "a postman",
];
const WEATHER: [&str; 6] = ["cold and clear", "warm", "foggy", "windy", "dry", "grey and damp"];
const BUILDINGS: [&str; 10] = [
    "library",
    "bridge",
    "school",
    "theatre",
    "hospital",
    "swimming pool",
    "museum",
    "railway station",
    "lighthouse",
    "market hall",
];
const THINGS: [&str; 10] = [
    "silver cup",
    "Roman coin",
    "stone axe",
    "wooden boat",
    "gold ring",
    "bronze bell",
    "painted jar",
    "glass lamp",
    "iron sword",
    "bone flute",
];
const SPOTS: [&str; 8] =
    ["a field", "a cellar", "an old well", "the forest", "a quarry", "the river bank", "a barn", "the castle garden"];
const ANIMALS: [&str; 9] = ["dog", "horse", "cow", "young owl", "cat", "goat", "swan", "fox", "donkey"];
const TRAPS: [&str; 6] = ["a canal", "a deep well", "the harbour", "a ditch", "an icy pond", "a mill race"];
const CROPS: [&str; 8] = ["wheat", "barley", "apples", "potatoes", "plums", "rye", "oats", "beans"];

/// Election, match, opening, flood, find, rescue, harvest.
const ALL: [StoryEvent; 7] = [
    StoryEvent {
        title: "{one} elected mayor of {town}",
        sentences: &[
            &[
                "The people of {town} chose a new mayor on {day}",
                "On {day} a new mayor was chosen in {town}",
                "{town} has had a new mayor since {day}",
            ],
            &[
                "{one} won against {two}",
                "{two} lost to {one}",
                "{one} had more votes than {two}",
                "{two} had fewer votes than {one}",
            ],
            &["{count} people had voted", "There were {count} votes"],
        ],
        questions: &[
            ("Who won?", "one"),
            ("Who lost?", "two"),
            ("When was the mayor of {town} chosen?", "day"),
            ("Where was a mayor chosen?", "town"),
            ("How many people voted?", "count"),
        ],
    },
    StoryEvent {
        title: "{town} beats {guest} {high}:{low}",
        sentences: &[
            &["The final was played on {day}", "On {day} the final was played at last"],
            &[
                "{town} beat {guest} by {high} to {low}",
                "{guest} lost to {town} by {low} to {high}",
                "It ended {high} to {low} for {town} against {guest}",
            ],
            &["{one} scored the last goal", "The last goal was {one}'s"],
        ],
        questions: &[
            ("Which town won?", "town"),
            ("Which town lost?", "guest"),
            ("When was the final?", "day"),
            ("Who scored the last goal?", "one"),
        ],
    },
    StoryEvent {
        title: "New {building} for {town}",
        sentences: &[
            &[
                "{town} has a new {building}",
                "A new {building} was opened in {town}",
                "The new {building} of {town} is ready",
            ],
            &[
                "{one}, who had planned it, cut the ribbon on {day}",
                "On {day} {one}, who had planned it, cut the ribbon",
            ],
            &["It cost {count} thousand crowns", "{count} thousand crowns were spent on it"],
        ],
        questions: &[
            ("What is new in {town}?", "building"),
            ("Who planned the {building}?", "one"),
            ("How many thousand crowns did the {building} cost?", "count"),
            ("When was the ribbon cut?", "day"),
            ("Which town has a new {building}?", "town"),
        ],
    },
    StoryEvent {
        title: "{count} families flee flood in {town}",
        sentences: &[
            &[
                "After {high} days of rain the {river} rose over its banks",
                "It rained for {high} days, and the {river} rose",
            ],
            &[
                "In {town}, {count} families had to leave their homes",
                "{count} families of {town} had to leave their homes",
                "The water came into the houses of {count} families in {town}",
            ],
            &["{one} led the fire brigade", "The fire brigade was led by {one}"],
        ],
        questions: &[
            ("Which river rose?", "river"),
            ("How many days did it rain?", "high"),
            ("How many families were driven out?", "count"),
            ("Who led the fire brigade?", "one"),
            ("Where was the flood?", "town"),
        ],
    },
    StoryEvent {
        title: "{one} finds {thing} near {town}",
        sentences: &[
            &[
                "Near {town}, {one} has found a {thing}",
                "{one} found a {thing} near {town}",
                "A {thing} was found near {town} by {one}",
            ],
            &["It lay in {spot}", "For a long time it had lain in {spot}"],
            &["{two} thinks that it is {count} years old", "According to {two}, it is {count} years old"],
        ],
        questions: &[
            ("What was found?", "thing"),
            ("Who found the {thing}?", "one"),
            ("Where did the {thing} lie?", "spot"),
            ("How old is the {thing}, in years?", "count"),
            ("Near which town was it found?", "town"),
        ],
    },
    StoryEvent {
        title: "{one} saves {animal} in {town}",
        sentences: &[
            &["A {animal} fell into {trap} in {town} on {day}", "On {day} a {animal} fell into {trap} in {town}"],
            &["{two} heard it and called for help", "It was heard by {two}, who called for help"],
            &["{one} pulled it out", "In the end it was pulled out by {one}"],
        ],
        questions: &[
            ("Who pulled out the {animal}?", "one"),
            ("Who called for help?", "two"),
            ("What did the {animal} fall into?", "trap"),
            ("When did the {animal} fall?", "day"),
            ("Which animal fell?", "animal"),
            ("Where did it happen?", "town"),
        ],
    },
    StoryEvent {
        title: "{count} tons of {crop} around {town}",
        sentences: &[
            &[
                "The farmers around {town} have brought in {count} tons of {crop}",
                "{count} tons of {crop} were brought in around {town}",
            ],
            &["{one}'s share was the largest", "{one} had the largest share"],
            &["All of it was in the barns by {day}", "By {day} all of it was in the barns"],
        ],
        questions: &[
            ("What was brought in?", "crop"),
            ("How many tons were brought in?", "count"),
            ("Who had the largest share?", "one"),
            ("By when was it in the barns?", "day"),
            ("Around which town was it?", "town"),
        ],
    },
];

/// Draws an event and its facts.
pub(super) fn drawn(draws: &mut Draws) -> (&'static StoryEvent, Facts) {
    let [town, guest, elsewhere] = places(draws);
    let [one, two, visitor] = people(draws);
    let low = draws.below(5);
    let high = low + 1 + draws.below(4);
    // Numbers of different facts do not collide.
    let count = 12 + draws.below(980);
    let mut pick = |among: &[&str]| draws.pick(&among.iter().map(|x| &**x).collect::<Vec<&str>>()).to_owned();
    let mut facts: Facts = vec![
        ("day", pick(&DAYS)),
        ("a_trade", pick(&TRADES)),
        ("weather", pick(&WEATHER)),
        ("building", pick(&BUILDINGS)),
        ("thing", pick(&THINGS)),
        ("spot", pick(&SPOTS)),
        ("animal", pick(&ANIMALS)),
        ("trap", pick(&TRAPS)),
        ("crop", pick(&CROPS)),
    ];
    facts.extend([("town", town), ("guest", guest), ("elsewhere", elsewhere)]);
    facts.extend([("one", one), ("two", two), ("visitor", visitor), ("river", river(draws))]);
    facts.extend([("low", low.to_string()), ("high", high.to_string()), ("count", count.to_string())]);
    (&ALL[draws.below(ALL.len())], facts)
}
