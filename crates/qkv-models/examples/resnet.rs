//! A ResNet's logits for photographs, and the time of a pass: `resnet FOLDER IMAGE…`, with images of 224 × 224 to
//! compare with another program (`dev/resnet.py` does so).

use qkv_models::ResNet;
use qkv_models::image::Image;
use qkv_nn::Machine;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let resnet = ResNet::open(arguments.next().ok_or("name the folder of the model")?)?;
    let images = arguments.map(Image::open).collect::<Result<Vec<_>, _>>()?;
    let machine = Machine::new(rayon::current_num_threads());
    rayon::scope(|_| {
        let logits = resnet.logits(&images, &machine)?;
        let mut best = f64::INFINITY;
        for _ in 0..10 {
            let start = Instant::now();
            resnet.logits(&images[..1], &machine)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        eprintln!("{:.1} ms an image, best of 10", 1e3 * best);
        for row in logits.data().chunks_exact(resnet.labels.len()) {
            println!("{}", serde_json::to_string(row)?);
        }
        Ok(())
    })
}
