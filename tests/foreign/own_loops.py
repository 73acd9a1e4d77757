"""Training loops with habits that are seen in public scripts: each is exact, or an error names it.

A loop is the usual one with other pieces. Its name is a sentence; `says` is a part of the error, empty if the loop is
exact, and `warns` a part of a warning.
"""

import textwrap
from dataclasses import dataclass

SCRIPT = """
import copy, itertools, os
import numpy as np, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import samebits

RANK, WORLD = (int(os.environ.get(name, number)) for name, number in (("RANK", 0), ("WORLD_SIZE", 1)))
torch.manual_seed(0)
X, Y = torch.randn(37, 6), torch.randint(0, 3, (37,))
data, options, make = TensorDataset(X, Y), {}, torch.optim.SGD
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
models = net
SETUP
parameters = list(net.parameters())
loader = DataLoader(data, **{"batch_size": 4, "shuffle": True, **options})
_, optimizer, loader = samebits.exact(models, make(net.parameters(), 0.1), loader, global_batch=16, micro_batch=4)
BEFORE
for epoch in range(3):
    EPOCH
    for i, batch in enumerate(READ):
        BODY
digest = samebits.weights_sha256(net.state_dict())
if os.environ.get("RANK", "0") == "0":
    print("sha256", digest)
"""
BODY = """
x, y = batch
optimizer.zero_grad()
out = net(x)
loss = F.cross_entropy(out, y)
LOSS
BACKWARD
BETWEEN
optimizer.step()
END
"""


@dataclass(frozen=True)
class Loop:
    """The pieces of a loop that are not usual."""

    says: str = ""
    warns: str = ""
    setup: str = ""
    before: str = ""
    epoch: str = ""
    read: str = "loader"
    body: str = BODY
    loss: str = ""
    backward: str = "loss.backward()"
    between: str = ""
    end: str = ""

    @property
    def script(self) -> str:
        """The source of the script."""
        text = SCRIPT.replace("READ", self.read)
        for name in ("setup", "before", "epoch", "body", "loss", "backward", "between", "end"):
            lines = []
            for line in text.splitlines():
                own = textwrap.dedent(getattr(self, name)).strip().splitlines() or ["pass"]
                indent = " " * (len(line) - len(line.lstrip()))
                lines += [indent + each for each in own] if line.strip() == name.upper() else [line]
            text = "\n".join(lines)
        return text


GRAPH = "loss.backward(retain_graph=True)"
BY_HAND, OWN, CARRIED = "the loop sets a gradient itself", "other values when it is read again", "when it is repeated"
NOISE = "random numbers that it draws between backward() and optimizer.step()"
KEPT = "in each micro-batch, and the loss depends on it"
NONE, COUNT = "optimizer.step() finds no gradient", "the loop over the exact loader ended"
START = "weights were loaded or changed after exact()"
OTHER = "the loop reads a second DataLoader in each micro-batch"
STATISTICS = ", in training mode, changes its running statistics in the loop"
TEACHER = "teacher = copy.deepcopy(net).requires_grad_(False)"
DISTILL = "loss = loss + F.mse_loss(out, teacher(x))"
# Two processes have numbers of their own in it.
OTHERS = "others = itertools.cycle(DataLoader(data, batch_size=4, shuffle=True, drop_last=True))"
SHARE = "a DataLoader with a DistributedSampler gives each process a share"
SHARED = "val_loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, WORLD, RANK))"
EVALUATE = """
hits = [sum((net.eval()(x).argmax(1) == y).sum() for x, y in val_loader)]
net.train()
"""

# Equal to the usual loop: a gradient for the log is nobody's business.
LOGS = {
    "the gradient of one loss is logged after backward()": Loop(
        backward=GRAPH, between="norm = sum(g.norm() for g in torch.autograd.grad(loss, parameters))"
    ),
    "the gradient of one layer is logged after backward()": Loop(
        backward=GRAPH, between="torch.autograd.grad(out.square().mean(), net[4].weight)"
    ),
    "the gradient of one loss is logged before backward()": Loop(
        loss="torch.autograd.grad(out.square().mean(), parameters, retain_graph=True)"
    ),
}
EXACT = {
    "noise is drawn in the step of the optimizer": Loop(
        setup="""
        class make(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                super().step()
                for p in self.param_groups[0]["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)
        """
    ),
    "a teacher in training mode is given to exact()": Loop(setup=TEACHER + "; models = [net, teacher]", loss=DISTILL),
    "a teacher in evaluation mode follows once a step": Loop(
        setup=TEACHER + ".eval()",
        loss=DISTILL,
        end="""
        if loader.sync_gradients:
            for old, new in zip(teacher.state_dict().values(), net.state_dict().values()):
                old.copy_(0.9 * old + 0.1 * new)
        """,
    ),
    "an average with running statistics is moved at the top of the last micro-batch": Loop(
        setup=TEACHER,
        body="if loader.sync_gradients: teacher.load_state_dict(net.state_dict())\n" + BODY,
    ),
    "another DataLoader is only measured": Loop(
        before=OTHERS, epoch="net.eval(); net(next(others)[0]); net.train()", end="shown = next(others)[0].mean()"
    ),
    "a validation within the step reads another DataLoader": Loop(
        end="if loader.sync_gradients: print(sum(y.sum().item() for x, y in DataLoader(data, batch_size=5)))"
    ),
    "a meter and a mean by count are only logged": Loop(
        before="running, seen, it, meter = 0.0, 0, 0, []",
        loss="seen += len(x); it += 1; meter.append(loss.item())",
        end="running = 0.9 * running + 0.1 * loss.item(); shown = loss.item() / seen, sum(meter) / it, running",
    ),
    "a warm-up counts by its scheduler, and a weight by steps": Loop(
        before="""
        warm_up = loader.per_step(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 4)))
        """,
        loss="loss = loss + min(1, loader.step / 6) * out.square().mean()",
        end="warm_up.step()",
    ),
    "a step counter under sync_gradients weighs the loss": Loop(
        before="count = 0", loss="loss = loss + 0.1 * count * out.mean()", end="if loader.sync_gradients: count += 1"
    ),
    "values for the log are kept, and an option is off": Loop(
        before="total, anneal, last = 0.0, False, 0.0",
        loss="if anneal: loss = loss + total * out.mean()",
        end="total += loss.item(); last, shown = loss.item(), total / (i + 1) - last",
    ),
    "noise on the gradient has a generator of the step": Loop(
        between="""
        generator = torch.Generator().manual_seed(loader.step)
        for p in parameters:
            p.grad += 0.01 * torch.randn(p.shape, generator=generator)
        """
    ),
    "a penalty on gradients is a part of the loss": Loop(
        loss="loss = loss + torch.autograd.grad(out.sum(), parameters[-1], create_graph=True)[0].square().mean()"
    ),
    "the mean gradient is replaced by a function of itself": Loop(
        between="""
        if loader.sync_gradients:
            for p in parameters:
                p.grad = p.grad / (1 + p.grad.norm())
        """
    ),
    "a pass in training mode is measured before step()": Loop(
        between="F.cross_entropy(net(x), y)", warns="change no buffers"
    ),
    "the whole step is compiled": Loop(
        before="""
        @torch.compile(backend="eager")
        def step(x, y):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        """,
        body="step(*batch)",
    ),
    "the dataset grows, and exact() is called again": Loop(
        epoch="""
        if epoch:
            data = TensorDataset(torch.cat([X, X[: 4 * epoch]]), torch.cat([Y, Y[: 4 * epoch]]))
            net, optimizer, loader = samebits.exact(
                net, optimizer, DataLoader(data, batch_size=4, shuffle=True), global_batch=16
            )
            loader.set_epoch(0)
        """
    ),
    "the loop ends by steps": Loop(end="if loader.sync_gradients and loader.step % 3 == 2: break"),
    "weights are loaded before exact()": Loop(
        setup="net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})"
    ),
}
WARNED = {
    "the DataLoader has a generator": Loop(
        warns="follows from seed=0 of exact()", setup='options["generator"] = torch.Generator().manual_seed(1)'
    ),
    "the sampler has a seed": Loop(
        warns="follows from seed=0 of exact()",
        setup="options.update(shuffle=None, sampler=DistributedSampler(data, 1, 0, seed=3))",
    ),
    "a sampler of a subset has a generator": Loop(
        warns="follows from seed=0 of exact()",
        setup="""
        generator = torch.Generator().manual_seed(1)
        options.update(shuffle=None, sampler=torch.utils.data.SubsetRandomSampler(range(37), generator))
        """,
    ),
    "an evaluation counts itself": Loop(
        warns="a pass over an EvalLoader has counted nothing",
        epoch="hits = sum((net.eval()(x).argmax(1) == y).sum() for x, y in samebits.EvalLoader(loader_of_data)); "
        "net.train()",
        setup="loader_of_data = DataLoader(data, batch_size=8)",
    ),
    "an evaluation reads the share of a process": Loop(
        warns=SHARE,
        before=SHARED,
        epoch=EVALUATE,
    ),
    "the best epoch is that of a share": Loop(
        warns=SHARE,
        before="best = 0; " + SHARED,
        epoch=EVALUATE + "best = max(best, *hits)",
    ),
    "an accuracy is divided by the number of processes": Loop(
        warns=SHARE,
        before=SHARED,
        epoch=EVALUATE + "print(epoch, hits[0] / len(val_loader.sampler) / WORLD)",
    ),
    "the loss does not depend on the parameters": Loop(warns="step 0 changed no parameter", loss="loss = 0 * loss"),
    "a constant is the target": Loop(
        warns="step 0 changed no parameter", loss="loss = F.cross_entropy(out[:, :1], torch.zeros_like(y))"
    ),
    "gradients are clipped to nothing": Loop(
        warns="step 0 changed no parameter",
        between="torch.nn.utils.clip_grad_value_(parameters, 0.0)",
    ),
}
NAMED = {
    "gradients are combined by hand (PCGrad)": Loop(
        BY_HAND,
        backward="a, b = (torch.autograd.grad(each, parameters, retain_graph=True) for each in (loss, out.sum()))",
        between="for p, g, h in zip(parameters, a, b): p.grad = g + h",
    ),
    "gradients of several backward passes are combined by hand": Loop(
        BY_HAND,
        backward="""
        kept = []
        for each in (loss, out.square().mean()):
            optimizer.zero_grad()
            each.backward(retain_graph=True)
            kept.append([p.grad.clone() for p in parameters])
        """,
        between="for p, g, h in zip(parameters, *kept): p.grad = g + h",
    ),
    "a gradient of one loss is added to p.grad": Loop(
        BY_HAND,
        backward=GRAPH,
        between="for p, g in zip(parameters, torch.autograd.grad(loss, parameters)): p.grad = p.grad + g",
    ),
    "derivatives of gradients are taken (AdaHessian)": Loop(
        "backward(create_graph=True)",
        backward="loss.backward(create_graph=True)",
        between="torch.autograd.grad([p.grad.sum() for p in parameters], parameters)",
    ),
    "gradients have a graph": Loop("backward(create_graph=True)", backward="loss.backward(create_graph=True)"),
    "gradients have a graph, by torch.autograd": Loop(
        "backward(create_graph=True)", backward="torch.autograd.backward([loss], create_graph=True)"
    ),
    "zero_grad() is called before step()": Loop(NONE, between="optimizer.zero_grad()"),
    "zero_grad() of the model is called before step()": Loop(NONE, between="net.zero_grad()"),
    "gradients are deleted before step()": Loop(NONE, between="for p in parameters: p.grad = None"),
    "noise is added to gradients": Loop(
        NOISE, between="for p in parameters: p.grad += 0.01 * torch.randn_like(p.grad)"
    ),
    "gradients are replaced by noisy ones once a step": Loop(
        NOISE,
        between="""
        if loader.sync_gradients:
            for p in parameters: p.grad = p.grad + 0.01 * torch.randn_like(p.grad)
        """,
    ),
    "a part of the gradients is dropped at random": Loop(
        NOISE, between="for p in parameters: p.grad.mul_((torch.rand_like(p.grad) > 0.1).float())"
    ),
    "an augmentation has a generator of its own": Loop(
        OWN,
        setup="""
        class Own(Dataset):
            random = np.random.default_rng(0)
            def __len__(self): return 37
            def __getitem__(self, i): return X[i] + float(self.random.standard_normal()), Y[i]
        data = Own()
        """,
    ),
    "an augmentation in a worker has a generator of its own": Loop(
        OWN,
        setup="""
        class Own(Dataset):
            generator = torch.Generator().manual_seed(3)
            def __len__(self): return 37
            def __getitem__(self, i): return X[i] + torch.randn(6, generator=self.generator), Y[i]
        data = Own()
        options["num_workers"] = 1
        """,
    ),
    "the dataset changes its samples in place": Loop(
        OWN,
        setup="""
        class Cached(Dataset):
            def __len__(self): return 37
            def __getitem__(self, i): X[i] -= 0.2; return X[i].clone(), Y[i]
        data = Cached()
        """,
    ),
    "collate_fn counts": Loop(
        OWN,
        setup="""
        count = itertools.count()
        def collate(items):
            x, y = torch.utils.data.default_collate(items)
            return x * (1 + next(count) % 3), y
        options["collate_fn"] = collate
        """,
    ),
    "a weight of the loss follows the number of batches": Loop(KEPT, loss="loss = loss + 0.01 * i * out.mean()"),
    "dropout follows a counter": Loop(CARRIED, end="net[3].p = min(0.5, 0.01 * (i + 1))"),
    "a hidden state goes from batch to batch": Loop(
        CARRIED,
        before="state = torch.zeros(3)",
        loss="loss = loss + (out.mean(0) + state).square().mean()",
        end="state = out.mean(0).detach()",
    ),
    "a running mean of the loss is a threshold": Loop(
        KEPT, before="mean = 1.0", loss="loss = loss / mean; mean = 0.9 * mean + 0.1 * loss.item()"
    ),
    "a second loss begins after 1,000 passes": Loop(
        KEPT, before="num = 0", loss="loss = loss + (1.0 if num >= 1000 else 0.0) * out.mean()", end="num += 1"
    ),
    "a function of a counter gives a weight of the loss": Loop(
        KEPT,
        before="""
        num = 0
        def weight(n, start=1000): return 0.0 if n < start else 1.0
        """,
        loss="factor = weight(num); loss = loss + factor * out.mean()",
        end="num = num + 1",
    ),
    "samples are chosen by a running mean of the loss": Loop(
        KEPT,
        before="mean = 1.0",
        loss="""
        each = F.cross_entropy(out, y, reduction="none")
        mean = 0.9 * mean + 0.1 * each.mean().item()
        loss = (each * (each.detach() > mean)).mean()
        """,
    ),
    "a second DataLoader is read": Loop(
        OTHER, before=OTHERS, loss="loss = loss + net(next(others)[0]).square().mean()"
    ),
    "a second DataLoader is read beside the first one": Loop(
        OTHER,
        before=OTHERS,
        read="zip(loader, others)",
        body="batch, (u, _) = batch\n" + BODY,
        loss="loss = loss + net(u).square().mean()",
    ),
    "a second DataLoader is read from the second epoch on": Loop(
        OTHER, before=OTHERS, loss="if epoch >= 1: loss = loss + net(next(others)[0]).square().mean()"
    ),
    "a second DataLoader is read from a step on": Loop(
        OTHER, before=OTHERS, loss="if loader.step >= 4: loss = loss + net(next(others)[0]).square().mean()"
    ),
    "an iterator from before exact() is read from a step on, in one pass with the batch": Loop(
        OTHER,
        setup="others = iter(DataLoader([*data] * 9, batch_size=2, shuffle=True))",
        loss="if loader.step >= 5: loss = loss + net(torch.cat([x, next(others)[0]])).square().mean()",
    ),
    "a second DataLoader begins to count in the third epoch": Loop(
        CARRIED,  # cycle() has kept its batches by then
        before=OTHERS,
        loss="loss = loss + (epoch == 2) * net(next(others)[0]).square().mean()",
    ),
    "a second set is read by a permutation of its own from a step on": Loop(
        CARRIED,
        before="order = iter(torch.randperm(37, generator=torch.Generator().manual_seed(1)).tolist() * 9)",
        loss="if loader.step >= 4: loss = loss + net(X[[next(order), next(order)]]).square().mean()",
    ),
    "a teacher is in training mode": Loop("teacher" + STATISTICS, setup=TEACHER, loss=DISTILL),
    "a teacher in a list is in training mode from the second epoch on": Loop(
        "BatchNorm1d" + STATISTICS,
        setup=TEACHER + "; kept = [teacher]; del teacher",
        loss="if epoch >= 1: loss = loss + F.mse_loss(out, kept[0](x))",
    ),
    "a teacher is made in the second epoch": Loop(
        "teacher" + STATISTICS,
        epoch="if epoch == 1: " + TEACHER,
        loss="if epoch >= 1: " + DISTILL,
    ),
    "a bank keeps features": Loop(
        CARRIED,
        before="bank = []",
        loss="loss = loss + sum((out.mean() - each) ** 2 for each in bank)",
        end="bank.append(out.mean().detach())",
    ),
    "the loop breaks by a number, and logs the step": Loop(COUNT, end="print(loader.step)\nif i == 9: break"),
    "the loop breaks by a counter, and logs the step": Loop(
        COUNT, before="done = 0", end="done += 1; print(loader.step)\nif done >= 10:\n    break"
    ),
    "islice() limits the loop, and it logs the step": Loop(
        COUNT, read="itertools.islice(loader, 10)", end="print(loader.step)"
    ),
    "torch gets other threads": Loop("torch has 3 threads", before="torch.set_num_threads(3)"),
    "torch gets other threads in the second epoch": Loop(
        "torch has 2 threads", epoch="torch.set_num_threads(1 + (epoch > 0))"
    ),
    "a library sets the threads in the loop": Loop("torch has 4 threads", end="torch.set_num_threads(4)"),
    "the dataset grows": Loop(
        "the dataset has 41 samples", setup="data = [*data]", epoch="if epoch: data += [*TensorDataset(X, Y)][:4]"
    ),
    "the dataset shrinks": Loop("the dataset has 30 samples", setup="data = [*data]", epoch="if epoch: del data[30:]"),
    "the dataset is filtered after exact()": Loop(
        "the dataset has 20 samples", setup="data = [*data]", before="data[:] = data[:20]"
    ),
    "weights are loaded after exact(), without a position": Loop(
        START, before="net.load_state_dict(copy.deepcopy(net.state_dict()))"
    ),
    "weights are copied after exact()": Loop(
        START, before="with torch.no_grad(): net[0].weight.copy_(net[0].weight + 1)"
    ),
    "weights are drawn after exact()": Loop(START, before="net[0].reset_parameters()"),
    "the dataset returns batches": Loop(
        "the DataLoader has no batch_size", setup="options.update(batch_size=None, shuffle=None)"
    ),
}
