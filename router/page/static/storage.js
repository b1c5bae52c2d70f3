// Conversations in the browser's own database, apart for each tenant. Without a database (private windows, no room left)
// they live in memory until the page is closed.

const NAME = "cpd-page";

/** The kept conversations of one tenant. */
export class Storage {
  /** @param {string} tenant */
  static async open(tenant) {
    let database = null;
    try {
      database = await openDatabase();
    } catch {
      // as said above
    }
    return new Storage(tenant, database);
  }

  constructor(tenant, database) {
    this.tenant = tenant;
    this.database = database;
    this.memory = new Map(); // what the database could not take
    this.closed = false;
    this.channel = new BroadcastChannel(NAME);
  }

  /** True if conversations outlive the page. */
  get lasting() {
    return this.database !== null;
  }

  /** Calls `callback` with a conversation's id when another tab has changed or removed it. */
  onChange(callback) {
    this.channel.onmessage = ({ data }) => data.tenant === this.tenant && callback(data.id);
  }

  /** Id, title and date of all conversations, latest first. */
  async list() {
    const kept =
      this.database && !this.closed ? await this.#run("titles", (store) => store.getAll(this.#range())) : [];
    return [...kept.filter(({ id }) => !this.memory.has(id)), ...this.memory.values()]
      .map(({ id, title, updated }) => ({ id, title, updated }))
      .sort((one, other) => other.updated - one.updated);
  }

  /** A conversation; undefined if there is none with this id. */
  async read(id) {
    if (this.memory.has(id) || !this.database) return structuredClone(this.memory.get(id));
    return (await this.#run("conversations", (store) => store.get([this.tenant, id])))?.conversation;
  }

  /** Keeps a conversation; in memory only, if the database has no room. */
  async write(conversation) {
    const { id, title, updated } = conversation;
    try {
      if (!this.database) throw new Error("no database");
      const transaction = this.database.transaction(["titles", "conversations"], "readwrite");
      transaction.objectStore("titles").put({ tenant: this.tenant, id, title, updated });
      transaction.objectStore("conversations").put({ tenant: this.tenant, id, conversation });
      await ended(transaction);
    } catch {
      this.memory.set(id, conversation);
      return;
    }
    this.memory.delete(id);
    this.#tell(id);
  }

  /** Removes a conversation. */
  async remove(id) {
    this.memory.delete(id);
    if (this.database) {
      const transaction = this.database.transaction(["titles", "conversations"], "readwrite");
      for (const name of ["titles", "conversations"]) transaction.objectStore(name).delete([this.tenant, id]);
      await ended(transaction);
    }
    this.#tell(id);
  }

  /** Removes all conversations of this tenant. */
  async clear() {
    for (const { id } of await this.list()) await this.remove(id);
  }

  /** Ends what has begun; after it nothing is kept. */
  close() {
    this.closed = true;
    this.channel.close();
    this.database?.close();
  }

  #tell(id) {
    if (!this.closed) this.channel.postMessage({ tenant: this.tenant, id });
  }

  #range() {
    return IDBKeyRange.bound([this.tenant], [this.tenant, []]);
  }

  #run(name, ask) {
    return answer(ask(this.database.transaction(name).objectStore(name)));
  }
}

function openDatabase() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => {
    for (const name of ["titles", "conversations"])
      opening.result.createObjectStore(name, { keyPath: ["tenant", "id"] });
  };
  return answer(opening);
}

function answer(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function ended(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}
