// Stress of the CPU protocol without Python and XLA: fresh random worlds, every result checked
// against an independent one, until enough epochs have passed. Direct driving and driving through a
// Group take turns.
//
// Usage: protocol_stress SEED EPOCHS
#include "stress_corrupt.h"
#include "stress_direct.h"
#include "stress_faults.h"
#include "stress_group.h"
#include "stress_main.h"

namespace jax_ep::stress {

// Returns epochs passed, both channels together.
int64_t run_world(Random& random) {
  const World world = random_world(random);
  for (int again = 0; again < 5; ++again) run_corrupt(random, world);
  int64_t epochs = 0;
  auto count = [&](const std::vector<Round>& rounds) {
    for (const Round& round : rounds) epochs += 3 * epochs_of(world, round);
  };
  const std::vector<Round> rounds = random_rounds(random, world);
  const Payload payload = chance(random, 50) ? Payload::kWindow : Payload::kReference;
  DirectDriver(world, rounds, payload).run(random, chance(random, 50));
  count(rounds);

  Group group(WindowLayout::make(world.shape), kTimeout, payload);
  for (int again = 0; again < 2 && !failures.any(); ++again) {
    const std::vector<Round> fresh = random_rounds(random, world);
    run_group(group, world, fresh, random, chance(random, 50));
    count(fresh);
    if (!failures.any()) group.reset();  // the window is as new, and old signals mean nothing
  }
  if (chance(random, 25) && !failures.any()) run_faults(random, world, payload);
  return epochs;
}

}  // namespace jax_ep::stress

int main(int argc, char** argv) {
  return jax_ep::stress::run_worlds(argc, argv, jax_ep::stress::run_world);
}
