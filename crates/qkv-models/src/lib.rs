//! Attention models on top of `qkv-nn`: Transformers that translate and generate text, recurrent models with attention,
//! encoders that classify, tag, answer and embed, hierarchical attention over documents, and vision models; their
//! training, decoding, metrics and file formats.
#![forbid(unsafe_code)]

mod adapters;
mod architecture;
mod batch;
pub mod chat;
mod checkpoint;
mod classifier;
mod conv_stem;
mod describe;
mod detect;
mod encoder;
mod error;
mod evaluation;
mod eyes;
mod finite;
mod generator;
mod gpt;
mod han;
mod image_encoder;
mod inspection;
mod kind;
pub mod labelled;
mod layout;
pub mod metrics;
mod model;
mod observed;
mod observed_attention;
mod own_folder;
mod pictures;
mod probabilities;
mod provenance;
mod recipe;
mod recurrent;
mod resnet;
mod resnet_stem;
mod schedule;
mod search;
mod sizes;
mod start;
pub mod tasks;
pub mod train;
mod transformer;
mod translator;
mod vit;
mod voice;
mod vqa;
mod whisper;

pub use architecture::{Architecture, ModelConfig};
pub use batch::{Batch, IGNORE, Rows, SpecialTokens};
pub use classifier::Classifier;
pub use conv_stem::Stem;
pub use describe::{DecoderKind, DescribeConfig, Describer, Description, LookedAt};
pub use detect::{DetectConfig, Detected, Detector, FoundBox};
pub use encoder::{Answer, Encoder, EncoderConfig, Head, Pooling};
pub use error::{Error, Result};
pub use evaluation::Evaluation;
pub use generator::{Finish, Generated, Generation, Generator};
pub use gpt::{Gpt, GptConfig, GptState, LocalLayers};
pub use han::{Document, Han, HanConfig, ReadSentence, ReadWord, Reading};
pub use image_encoder::ImageEncoderConfig;
pub use inspection::{Inspection, TensorSummary};
pub use kind::kind;
pub use layout::Dialect;
pub use model::{Group, Model, State};
pub use observed::{Alignment, Observed, ObservedDocument};
pub use observed_attention::ObservedAttention;
pub use provenance::Provenance;
pub use qkv_formats::{audio, draws, files, image, text};
pub use recipe::{
    Data, Division, Lora, Metric, ModelSource, Objective, Parallel, Pretrained, Recipe, TokenizerSource, Training,
};
pub use recurrent::{Recurrent, RecurrentConfig, RecurrentState};
pub use resnet::ResNet;
pub use schedule::Schedule;
pub use search::{Hypothesis, Sampling, Search};
pub use transformer::{Transformer, TransformerConfig, TransformerState};
pub use translator::{Translation, Translator};
pub use vit::{ObservedImage, Vit, VitConfig};
pub use voice::{SpeakOptions, Speaker, Speech, VoiceConfig, diagonal_share};
pub use vqa::{ImageAnswer, Vqa, VqaConfig};
pub use whisper::{LANGUAGES, Listened, Recognizer, Segment, Task, TranscribeOptions, Transcript, WhisperConfig, Word};
